"""A chat's prompt: messages and tools in the form that the model's chat template reads."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import regex

from ...runtime.tokenizer.chat_messages import in_order, joined, linked, native_calls
from ...runtime.tokenizer.chat_template import ChatTemplateError, ChatTemplates
from ...runtime.tokenizer.template_reads import TemplateReads, template_reads
from ..http.body import check_structure
from ..parsing.in_text import tools_in_text, turns_in_text
from ..parsing.tool_calls import Tool, ToolCallFormat
from .protocol import ChatOptions

Message = dict[str, Any]


def render_chat(templates: ChatTemplates, options: ChatOptions, form: ToolCallFormat) -> str:
    """Return the prompt. What the template does not read is told as text.

    Raises `InvalidRequest`, and `ChatTemplateError` where the template refuses the messages.
    """
    calls = [call for message in options.messages for call in message.tool_calls]
    texts = [call.function.arguments for call in calls]
    check_structure("".join([text for text in texts if isinstance(text, str)]).encode())
    render = partial(_render, templates, options, form)
    reads = template_reads(templates, tools=True)
    if options.told and form.in_template and reads.tools:
        # The template may refuse these tools, such as parameters without a description.
        with contextlib.suppress(ChatTemplateError):
            return render(reads, tools=options.told)
    return render(template_reads(templates, tools=False), tools=[])


def _render(
    templates: ChatTemplates,
    options: ChatOptions,
    form: ToolCallFormat,
    reads: TemplateReads,
    *,
    tools: Sequence[Tool],
) -> str:
    """Return the prompt. `tools` are told by the template, other tools of the request as text."""
    apply = partial(
        templates.render,
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        template_kwargs=options.template_kwargs,
        tools=[tool.described() for tool in tools] or ([] if reads.empty_tools else None),
    )
    messages = [message.for_template() for message in options.messages]
    messages = linked(joined(messages, reads), reads)
    if form.in_template:
        messages = form.told(messages, options.told)
    if options.told and not tools:
        messages = tools_in_text(form, messages, options.told)
    if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        if reads.calls and (form.in_template or not options.told):
            marks = _Marks(native_calls(messages, reads))
            text = _rendered(apply, in_order(marks.messages, reads))
            if text is not None and marks.are_in(text):
                return marks.named(text)
        try:
            messages = turns_in_text(form, messages)
        except (RecursionError, ValueError):
            raise ChatTemplateError(
                "the arguments of a tool call are nested too deeply, or hold a number that JSON "
                "does not have"
            ) from None
    return apply(in_order(messages, reads))


def _rendered(apply: partial[str], messages: Sequence[Message]) -> str | None:
    try:
        return apply(messages)
    except ChatTemplateError:
        return None


class _Marks:
    """Messages whose calls have names that occur nowhere else: a rendering shows whether the
    template has passed over a call.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._key = uuid.uuid4().hex
        self._names: list[str] = []
        ids: dict[str, str] = {}
        self.messages = [self._marked(message, ids) for message in messages]

    def _marked(self, message: Message, ids: dict[str, str]) -> Message:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                mark = f"{self._key}x{len(self._names)}x"
                self._names.append(call["function"]["name"])
                ids[call["id"]] = mark
                calls.append({**call, "function": {**call["function"], "name": mark}})
            return {**message, "tool_calls": calls}
        if message["role"] == "tool" and message.get("tool_call_id") in ids:
            return {**message, "name": ids[message["tool_call_id"]]}
        return message

    def are_in(self, text: str) -> bool:
        found = {match[1] for match in regex.finditer(rf"{self._key}x(\d+)x", text)}
        return len(found) == len(self._names)

    def named(self, text: str) -> str:
        """The text with the names themselves."""
        return str(
            regex.sub(rf"{self._key}x(\d+)x", lambda match: self._names[int(match[1])], text)
        )
