"""Tool calls as a model writes them: a format a file of this package, each with a `FORMAT`.

form = choose_format("auto", tokenizer.chat_template)
grammar = form.grammar(tools, required=False, parallel=True)     # what the text must follow
parser = form.parser({tool.name for tool in tools})
for text in pieces:
    events += parser.push(text)
events += parser.finish()
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from .events import Parser

AUTO = "auto"


class Tool(NamedTuple):
    """A function that the model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def described(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


class ToolCallFormat(Protocol):
    """How models of one kind write calls."""

    @property
    def name(self) -> str:
        """As `--tool-call-parser` takes it."""
        ...

    @property
    def in_template(self) -> bool:
        """Whether the models' own chat templates tell of tools, calls and their results; else
        `told` does.
        """
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parser must see though it may be special tokens."""
        ...

    def matches(self, template: str) -> bool:
        """Whether a chat template asks for this format."""
        ...

    def parser(self, names: Collection[str]) -> Parser:
        """For one text. `names`: of the tools; a call of anything else is text."""
        ...

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        content: Mapping[str, Any] | None = None,
    ) -> str:
        """Lark for llguidance: calls with arguments of their tools' schemas, one or, where they
        may be `parallel`, several; free text around them where none is `required`, or JSON of the
        schema `content` instead of them.
        """
        ...

    def told(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        """The messages with all of that as text."""
        ...


@cache
def formats() -> dict[str, ToolCallFormat]:
    """Every format by its name."""
    package = import_module(__package__)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [import_module(f"{__package__}.{name}") for name in names]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {form.name: form for form in found}


@cache
def choose_format(name: str, template: str | None) -> ToolCallFormat:
    """The format that `--tool-call-parser` names; auto: by the chat template. Raises `ValueError`
    with the names that there are.
    """
    known = formats()
    if name != AUTO:
        if name not in known:
            raise ValueError(
                f"--tool-call-parser must be {AUTO} or one of {', '.join(known)}, got {name}"
            )
        return known[name]
    fitting = (form for form in known.values() if form.matches(template or ""))
    return next(fitting, known["generic"])
