"""Renders a chat's prompt: messages and tools in the form that the model's chat template reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...runtime.tokenizer.chat_messages import in_order, joined, linked
from ...runtime.tokenizer.chat_template import ChatTemplateError, ChatTemplates
from ...runtime.tokenizer.conversation import calls_by_template, has_calls
from ...runtime.tokenizer.image_marks import IMAGE, Rendered, render_with_images
from ...runtime.tokenizer.template_reads import template_reads
from ..http.body import check_structure
from ..parsing.in_text import tools_in_text, turns_in_text
from ..parsing.tool_calls import Tool, ToolCallFormat
from .requests import ChatOptions

Message = dict[str, Any]


def render_chat(
    templates: ChatTemplates, options: ChatOptions, form: ToolCallFormat, placeholder: str = ""
) -> Rendered:
    """Return the prompt. Parts that the template does not read are written as text.

    `placeholder` is the text of an image in the model's prompts. Raise `InvalidRequest`, and
    `ChatTemplateError` if the template refuses the messages.
    """
    calls = [call for message in options.messages for call in message.tool_calls]
    if calls:
        texts = [call.function.arguments for call in calls]
        check_structure("".join([text for text in texts if isinstance(text, str)]).encode())
    messages = [message.for_template() for message in options.messages]
    render = partial(_render, templates, options, form)
    if not any(IMAGE in message["content"] for message in messages):
        return Rendered(render(messages, templates.render), [])
    return render_with_images(templates, messages, placeholder, render)


def _render(
    templates: ChatTemplates,
    options: ChatOptions,
    form: ToolCallFormat,
    messages: Sequence[Message],
    write: Callable[..., str],
    tools: Sequence[Tool] | None = None,
) -> str:
    """Return the prompt of messages. `write` is called as `templates.render`.

    The template writes `tools`, by default all that it takes. Other tools of the request become
    text.
    """
    if tools is None:
        tools = options.prompt_tools if form.in_template else []
        if tools and template_reads(templates, tools=True).tools:
            # The template may refuse these tools, for example parameters without a description.
            with contextlib.suppress(ChatTemplateError):
                return _render(templates, options, form, messages, write, tools)
        tools = []
    reads = template_reads(templates, tools=bool(tools))
    apply = partial(
        write,
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        template_kwargs=options.template_kwargs,
        tools=[tool.described() for tool in tools] or ([] if reads.empty_tools else None),
    )
    messages = linked(joined(messages, reads), reads)
    if form.in_template:
        messages = form.for_template(messages, options.prompt_tools)
    if options.prompt_tools and not tools:
        messages = tools_in_text(form, messages, options.prompt_tools)
    if has_calls(messages):
        if form.in_template or not options.prompt_tools:
            text = calls_by_template(apply, messages, reads)
            if text is not None:
                return text
        try:
            messages = turns_in_text(form, messages)
        except (RecursionError, ValueError):
            raise ChatTemplateError(
                "the arguments of a tool call are nested too deeply, or hold a number that JSON "
                "does not have"
            ) from None
    return apply(in_order(messages, reads))
