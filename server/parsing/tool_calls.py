"""Tool calls as models write them. Each format is a file of this package with `FORMATS`.

form = choose_format("auto", tokenizer.templates)     # `choice`
rules = CallRules(required=False, parallel=True, special=tokenizer.special_ids(form.marks))
grammar = form.grammar(tools, rules)     # of the answer
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
    """A function that the model may call. `parameters` is the JSON schema of its arguments.

    If `strict`, a keyword that grammars cannot follow is an error.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def whose(self) -> str:
        """The function's name for error messages."""
        return f"function {self.name!r}"

    def held(self) -> dict[str, Any]:
        """Return the schema that the grammar follows. Raise `ValueError`."""
        return held_schema(
            dict(self.parameters), whose=self.whose, strict=self.strict, closed=True, root=True
        )

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


class Call(NamedTuple):
    """A call of a tool. `arguments` is an object, or text that is not an object."""

    name: str
    arguments: Mapping[str, Any] | str


class CallRules(NamedTuple):
    """What the grammar of a text with calls allows.

    Attributes:
        required: Whether the text must be calls.
        parallel: Whether several calls are allowed.
        content: The schema of JSON that may replace calls. None allows free text, in which calls
            may begin.
        special: The format's marks that are special tokens of the tokenizer, with their ids. Other
            marks are text.
    """

    required: bool = False
    parallel: bool = True
    content: Mapping[str, Any] | None = None
    special: Mapping[str, int] = {}


class ToolCallFormat(Protocol):
    """How models of one kind write calls."""

    @property
    def name(self) -> str:
        """The value for `--tool-call-parser`."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of the format in vLLM and SGLang."""
        ...

    @property
    def in_template(self) -> bool:
        """Whether the chat template describes tools, calls and results. If not, `in_text.py`
        does.
        """
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        ...

    def matches(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        ...

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Return a parser of one text. Calls of other tools are text."""
        ...

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        """Return a Lark grammar for llguidance, of texts that `parser` reads.

        Arguments follow their tools' schemas. Raise `ValueError` for a schema that the format
        cannot follow.
        """
        ...

    def written(self, calls: Sequence[Call]) -> str:
        """Return a text of these calls as the model writes them."""
        ...

    def for_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        """Return the messages, changed for chat templates of this format."""
        ...


class InTemplate:
    """Base of formats that the chat template describes."""

    aliases: tuple[str, ...] = ()
    in_template = True

    def for_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        return list(messages)
