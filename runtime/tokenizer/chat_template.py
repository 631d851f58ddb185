"""Chat templates: a conversation becomes a prompt by the Jinja program that a model ships.

Templates are written for the environment that transformers gives them. It is rebuilt here, because
importing jinja2 takes a tenth of the time that importing transformers' renderer does, and the web
process needs nothing else of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT = "default"
# Names of templates of a model with several. The second is for conversations with tools.
TOOL_USE = "tool_use"
_END_OF_FINAL_MESSAGE = "END_OF_FINAL_MESSAGE "
_OURS = ("messages", "tools", "add_generation_prompt")


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


def read_chat_template(path_or_template: str) -> str:
    """Return the template of `--chat-template`: a file, or a template itself.

    Raise `ValueError` for neither of them, and for a broken template.
    """
    path = Path(path_or_template)
    if "{{" in path_or_template or "{%" in path_or_template:
        template = path_or_template
    elif path.is_file():
        template = path.read_text(encoding="utf-8")
    else:
        raise ValueError(
            f"--chat-template: there is no file {path_or_template}, and it is no Jinja template "
            "either"
        )
    _compile(template)
    return template


class ChatTemplates:
    """A model's templates by name. `variables` are texts that templates read, such as
    `bos_token`.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables)

    @property
    def default(self) -> str | None:
        """The template of a conversation without tools."""
        return self._templates.get(DEFAULT)

    def source(self, *, tools: bool) -> str | None:
        """The template of a conversation, with tools or without."""
        return (self._templates.get(TOOL_USE) if tools else None) or self.default

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt, special tokens included. Raise `ChatTemplateError`.

        `continue_final_message` leaves the last message open, so that the model continues it.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message exclude each other: set one to "
                "false"
            )
        if taken := [name for name in _OURS if name in (template_kwargs or {})]:
            raise ChatTemplateError(
                f"template arguments cannot set {taken[0]}: it has a field of its own in the "
                "request"
            )
        source = self.source(tools=bool(tools))
        if source is None:
            named = f" by default, only {', '.join(self._templates)}" if self._templates else ""
            raise ChatTemplateError(
                f"the model has no chat template{named}; give one with --chat-template FILE"
            )
        variables = {
            **self._variables,
            "documents": None,
            **(template_kwargs or {}),
            "messages": _open_final_message(messages) if continue_final_message else list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _compile(source).render(variables)
        except (
            Exception
            # A template is a program and may raise anything. Then these messages do not fit it.
        ) as error:
            raise ChatTemplateError(f"{error}" or type(error).__name__) from error
        return _cut_at_end_of_final_message(text) if continue_final_message else text


def _open_final_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark behind the last one's text, for `_cut_at_end_of_final_message`;
    transformers does the same.
    """
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content and "text" in content[-1]:
        *before, last = content
        opened: Any = [*before, {**last, "text": last["text"] + _END_OF_FINAL_MESSAGE}]
    elif isinstance(content, str):
        opened = content + _END_OF_FINAL_MESSAGE
    else:
        raise ChatTemplateError("continue_final_message needs a final message with text")
    return [*messages[:-1], {**messages[-1], "content": opened}]


def _cut_at_end_of_final_message(text: str) -> str:
    mark = _END_OF_FINAL_MESSAGE.strip()
    end = text.rfind(mark)
    if end < 0:
        raise ChatTemplateError(
            "the chat template leaves the final message out, so it cannot be continued"
        )
    # A template that trims messages has removed the blank after the mark, and would have removed
    # the blanks before it.
    trimmed = not text.startswith(_END_OF_FINAL_MESSAGE, end)
    return text[:end].rstrip() if trimmed else text[:end]


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """Compile a template once: compiling takes milliseconds, rendering some microseconds."""
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is broken: {error.message} (line {error.lineno})"
        ) from error


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return transformers' environment of templates: functions, filters, tags and white-space
    rules.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the model's text for training. A server renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, because jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
