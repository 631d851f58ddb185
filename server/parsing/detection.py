"""Detects the formats in which a chat template writes tool calls and thoughts.

The template renders a probe conversation. If a format's parser reads exactly the probe's call from
the assistant's turn, it is the format of calls. If a format's marks stand around the probe's
thought, it is the format of thoughts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ...runtime.tokenizer.chat_template import ChatTemplateError, ChatTemplates
from .catalog import formats, reasoning_formats
from .events import Arguments, CallBegins
from .reasoning import ReasoningFormat
from .tool_calls import Tool, ToolCallFormat

_QUESTION, _RESULT, _CALL_ID = "Probe question", "Probe result", "a1B2c3D4e"
_THOUGHT, _ANSWER = "Probe thought", "Probe answer"
_THOUGHT_MEMBERS = ("reasoning_content", "reasoning", "thinking")
_THINKS = {"enable_thinking": True, "thinking": True}
_TOOL = Tool(
    "probe_tool",
    "A probe.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A string."},
            "days": {"type": "integer", "description": "A number."},
            "parts": {"type": "array", "items": {"type": "string"}, "description": "A list."},
        },
        "required": ["city", "days", "parts"],
    },
)
_ARGUMENTS = {"city": "Bad Aachen", "days": 7, "parts": ["sun", "moon"]}


class Detected(NamedTuple):
    """The format of a chat template. `reason` says why it is the generic format, or is empty."""

    form: ToolCallFormat
    reason: str


@lru_cache(maxsize=64)
def detect(templates: ChatTemplates, named: tuple[str, ...] | None = None) -> Detected:
    """Return the format in which the chat template writes calls, among the formats `named`.

    Return the generic format if the template refuses tools or calls, or if no format reads its
    calls.
    """
    known = formats()
    candidates = [known[name] for name in (named or known) if known[name].in_template]
    generic, source = known["generic"], templates.source(tools=True)
    if source is None:
        return Detected(generic, "the model has no chat template")
    hinted = [form for form in candidates if form.matches(source)]
    try:
        answers = _answers(templates)
    except ChatTemplateError as error:
        return Detected(generic, f"the chat template takes no tool calls: {str(error)!r:.80}")
    for forms in (hinted, [form for form in candidates if form not in hinted]):
        if readers := [form for form in forms if _reads(form, answers)]:
            return Detected(_first(readers, answers[0]), "")
    if any(_TOOL.name in answer for answer in answers):
        return Detected(generic, "the chat template writes tool calls in a format unknown here")
    if hinted:
        with contextlib.suppress(ChatTemplateError):
            if _TOOL.name in _rendered(templates, [{"role": "user", "content": _QUESTION}]):
                return Detected(hinted[0], "")
    return Detected(generic, "the chat template writes no tool calls")


def _answers(templates: ChatTemplates) -> list[str]:
    """Return the assistant's turn with the probe's call: as the model writes it, and as rendered.

    Raise `ChatTemplateError` if the template refuses all calls.
    """
    refusal = None
    answers: list[str] = []
    for messages in _conversations():
        try:
            text = _rendered(templates, messages)
        except ChatTemplateError as error:
            refusal = refusal or error
            continue
        turn = text.rpartition(_QUESTION)[2].partition(_RESULT)[0]
        answers = [turn]
        if _TOOL.name in turn:
            prompt = _rendered(templates, messages[:1], add_generation_prompt=True)
            _, _, opening = prompt.rpartition(_QUESTION)
            return [turn.removeprefix(opening), turn]
    if refusal is not None and not answers:
        raise refusal
    return answers


def _conversations() -> Iterator[list[dict[str, Any]]]:
    """Yield the probe in the forms that different templates accept.

    Arguments are an object or text. Content beside the call is a text, missing or a list.
    """
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        for content in ("", None, [{"type": "text", "text": ""}]):
            question = (
                [{"type": "text", "text": _QUESTION}] if isinstance(content, list) else _QUESTION
            )
            function = {"name": _TOOL.name, "arguments": arguments}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            yield [
                {"role": "user", "content": question},
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": _CALL_ID,
                    "name": _TOOL.name,
                    "content": _RESULT,
                },
            ]


def _rendered(
    templates: ChatTemplates, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> str:
    return templates.render(
        messages, tools=[_TOOL.described()], add_generation_prompt=add_generation_prompt
    )


def _reads(form: ToolCallFormat, answers: Sequence[str]) -> bool:
    """Return whether the format's parser reads the probe's call from one of the texts."""
    return any(_calls(form, answer) == [(_TOOL.name, _ARGUMENTS)] for answer in answers)


def _first(forms: Sequence[ToolCallFormat], answer: str) -> ToolCallFormat:
    """Return the format that detects the call first in the answer.

    Other formats may read the call only when it is complete, because it is not in their own form.
    """
    if len(forms) == 1:
        return forms[0]
    return min(forms, key=partial(_place, answer=answer))


def _place(form: ToolCallFormat, answer: str) -> int:
    """Return the number of characters of the answer before its call begins."""
    parser = form.parser([_TOOL])
    for place, char in enumerate(answer):
        if any(isinstance(event, CallBegins) for event in parser.push(char)):
            return place
    return len(answer)


def _calls(form: ToolCallFormat, text: str) -> list[tuple[str, Any]]:
    parser = form.parser([_TOOL])
    calls: list[tuple[str, Any]] = []
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, CallBegins):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + event.text)
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return []


@lru_cache(maxsize=64)
def detect_reasoning(templates: ChatTemplates) -> ReasoningFormat | None:
    """Return the format in which the chat template writes thoughts, or None."""
    sources = [templates.source(tools=tools) or "" for tools in (False, True)]
    forms = list(reasoning_formats().values())
    hinted = [form for form in forms if any(form.matches(source) for source in sources)]
    if len(hinted) == 1:
        return hinted[0]
    prompts = list(_thoughts(templates))
    shown = (form for form in hinted or forms if any(_shows(form, text) for text in prompts))
    return next(shown, hinted[0] if hinted else None)


def _thoughts(templates: ChatTemplates) -> Iterator[str]:
    """Yield a conversation with a thought, and a prompt after which the model may think.

    Both are cut after the question.
    """
    question = {"role": "user", "content": _QUESTION}
    thought = dict.fromkeys(_THOUGHT_MEMBERS, _THOUGHT)
    answer = {"role": "assistant", "content": _ANSWER, **thought}
    for messages in ([question, answer], [question]):
        try:
            text = templates.render(
                messages, add_generation_prompt=len(messages) == 1, template_kwargs=_THINKS
            )
        except ChatTemplateError:
            continue
        yield text.rpartition(_QUESTION)[2]


def _shows(form: ReasoningFormat, text: str) -> bool:
    before, shown, behind = text.partition(_THOUGHT)
    closes = not shown or behind.lstrip().startswith(form.closing)
    return form.is_open(before) and closes
