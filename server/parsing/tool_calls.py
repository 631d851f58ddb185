"""Tool calls as a model writes them: a format a file of this package, with its `FORMATS`.

form = choose_format("auto", tokenizer.templates)     # `choice`
rules = CallRules(required=False, parallel=True, special=tokenizer.special_ids(form.marks))
grammar = form.grammar(tools, rules)     # what the text must follow
parser = form.parser(tools)
for text in pieces:
    events += parser.push(text)
events += parser.finish()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...runtime.sampling.json_schema import held_schema
from .events import Parser


class Tool(NamedTuple):
    """A function that the model may call. `parameters`: the JSON schema of its arguments; if it is
    `strict`, a keyword that calls cannot be held to is an error.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def whose(self) -> str:
        """The function in errors."""
        return f"function {self.name!r}"

    def held(self) -> dict[str, Any]:
        """The schema that calls are held to. Raises `ValueError`."""
        return held_schema(
            dict(self.parameters), whose=self.whose, strict=self.strict, closed=True, root=True
        )

    def described(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


class Call(NamedTuple):
    """A call of a tool. `arguments`: an object, or a text that is none."""

    name: str
    arguments: Mapping[str, Any] | str


class CallRules(NamedTuple):
    """What a text with calls must be: calls alone where they are `required`, JSON of the schema
    `content` instead of them where there is one, else free text in which calls may begin; several
    calls where they may be `parallel`. `special`: marks of the format that are special tokens of
    the served tokenizer, with their ids; the others are text.
    """

    required: bool = False
    parallel: bool = True
    content: Mapping[str, Any] | None = None
    special: Mapping[str, int] = {}


class ToolCallFormat(Protocol):
    """How models of one kind write calls."""

    @property
    def name(self) -> str:
        """As `--tool-call-parser` takes it."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names that vLLM and SGLang have for it."""
        ...

    @property
    def in_template(self) -> bool:
        """Whether the models' own chat templates tell of tools, calls and their results; else they
        are told as text (`in_text.py`).
        """
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parser must see though it may be special tokens."""
        ...

    def matches(self, template: str) -> bool:
        """Whether a chat template asks for this format."""
        ...

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """For one text. A call of anything else than these tools is text."""
        ...

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        """Lark for llguidance, of texts whose calls have arguments of their tools' schemas, as
        `parser` reads them. Raises `ValueError` for a schema that the format cannot be held to.
        """
        ...

    def written(self, calls: Sequence[Call]) -> str:
        """A text of these calls, as the model writes them."""
        ...

    def told(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        """The messages with what the chat templates of this format alone need."""
        ...


class InTemplate:
    """What most formats have in common: the chat template knows them."""

    aliases: tuple[str, ...] = ()
    in_template = True

    def told(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        return list(messages)
