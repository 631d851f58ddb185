"""A chat becomes requests of the engine, and their outputs become thoughts, calls and content.

All endpoint families whose bodies become a chat use this.

    conversation = await begin(serving, body, request_id, size=request.size)
    with Collector(serving, conversation.requests) as collector:
        ...
        for event in conversation.readers[index].push(output):
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, cast

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.chat_template import ChatTemplateError
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.errors import InvalidRequest
from ..core.limits import check_text
from ..parsing.choice import choose_reasoning
from ..parsing.events import CallBegins, Event, Parser, PlainText
from ..parsing.reasoning import ReasoningFormat
from ..serving.state import THREAD_FROM, Serving
from .generation import generation_requests
from .rendering import render_chat
from .requests import ChatCompletionRequest, ChatOptions
from .tools import ToolUse, chat_grammar, format_of, tool_use

ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class AnswerReader:
    """Parses the outputs of one sequence into events. `has_called`: whether a call has begun."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.has_called = False

    def push(self, output: RequestOutput) -> list[Event]:
        """Return the new events that are certain. The last output gives all remaining events."""
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish(is_cut=output.finish_reason != FinishReason.STOP)
        self.has_called |= any(isinstance(event, CallBegins) for event in events)
        return events

    def reason(self, output: RequestOutput) -> ChatFinishReason | None:
        """Return OpenAI's `finish_reason`."""
        if self.has_called and output.finish_reason == FinishReason.STOP:
            return "tool_calls"
        return cast("ChatFinishReason | None", output.finish_reason)


class Thinking(NamedTuple):
    """How the answers of one chat think.

    Attributes:
        is_open: Whether answers begin within a thought.
        is_apart: Whether the thought is separated from the text.
    """

    form: ReasoningFormat
    is_open: bool
    is_apart: bool


class Conversation(NamedTuple):
    """One chat, ready to be generated: sequences, and a reader for each of them.

    Attributes:
        is_plain: Whether the output is only text, without thoughts or calls.
        counted: By sequence: how many of its first tokens are thoughts, and how many were counted.
    """

    requests: list[RequestState]
    readers: list[AnswerReader]
    thinking: Thinking | None
    is_plain: bool
    counted: dict[int, tuple[int, int]]

    def reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """Return the number of thought tokens up to now.

        Only sequences that have grown are counted again, unless their thought has ended.
        """
        if self.thinking is None:
            return 0
        form, is_open, _ = self.thinking
        for index, request in enumerate(self.requests):
            thoughts, tokens = self.counted.get(index, (0, 0))
            ids = request.output_ids
            if len(ids) > tokens and not 0 < thoughts < tokens:
                thoughts = form.count_tokens(tokenizer, ids, is_open=is_open)
                self.counted[index] = thoughts, len(ids)
        return sum(thoughts for thoughts, _ in self.counted.values())


async def begin(
    serving: Serving, body: ChatCompletionRequest, request_id: str, *, size: int
) -> Conversation:
    """Return the conversation of a request. `size` is the size of the request's body in bytes.

    Raise `InvalidRequest`, and the errors of `Serving.check_room`.
    """
    serving.check_model(body.model)
    serving.check_room(body.samples, "n")
    ids, opens_thought = await chat_prompt(
        serving, body, size=size, add_special_tokens=body.add_special_tokens
    )
    use, form = tool_use(serving, body), reasoning_of(serving)
    thinking = form and Thinking(form, opens_thought, body.separate_reasoning)
    grammar = await chat_grammar(serving, body, use)
    if grammar is not None and form is not None:
        special = serving.engine.tokenizer.special_ids(form.marks)
        grammar = form.grammar(
            grammar, is_open=opens_thought, special=special, has_calls=use is not None
        )
    visible = _visible(serving.engine.tokenizer, thinking, use)
    budget = _budget(serving.engine.tokenizer, body, thinking)
    requests = generation_requests(serving, body, request_id, [ids], grammar, visible, **budget)
    # The messages are in the prompt now. Free their memory, because the answer may take minutes.
    body.messages.clear()
    body.chat_template_kwargs.clear()
    readers = [AnswerReader(_parser(thinking, use)) for _ in requests]
    is_plain = use is None and not (thinking and thinking.is_apart)
    return Conversation(requests, readers, thinking, is_plain, {})


def reasoning_of(serving: Serving) -> ReasoningFormat | None:
    """Return the reasoning format of the served model, or None if it does not think."""
    return choose_reasoning(serving.config.reasoning_parser, serving.engine.tokenizer.templates)


def _budget(
    tokenizer: Tokenizer, body: ChatCompletionRequest, thinking: Thinking | None
) -> dict[str, Any]:
    """Return the parameters that bound the thought. Empty for a model that does not think."""
    if body.thinking_budget is None or thinking is None:
        return {}
    _, tokens = body.thinking_budget
    return thinking.form.budget(tokenizer, tokens, is_open=thinking.is_open)


def _parser(thinking: Thinking | None, use: ToolUse | None) -> Parser:
    rest = PlainText() if use is None else use.parser()
    if thinking is None or not thinking.is_apart:
        return rest
    return thinking.form.parser(rest, is_open=thinking.is_open)


def _visible(
    tokenizer: Tokenizer, thinking: Thinking | None, use: ToolUse | None
) -> frozenset[int]:
    """Return the ids of special tokens that a parser must see."""
    marks = (*(thinking.form.marks if thinking else ()), *(use.form.marks if use else ()))
    return frozenset(tokenizer.special_ids(marks).values())


class ChatPrompt(NamedTuple):
    """Token ids of a prompt. If `opens_thought`, they end within a thought that the answer
    continues.
    """

    ids: list[int]
    opens_thought: bool


async def chat_prompt(
    serving: Serving,
    options: ChatOptions,
    *,
    size: int,
    add_special_tokens: bool,
    counting: bool = False,
) -> ChatPrompt:
    """Return the prompt of a chat by the model's chat template. Raise `InvalidRequest`.

    `size` is the size of the request's body in bytes. If `counting`, the prompt may be longer than
    the context.
    """
    tokenizer = serving.engine.tokenizer
    if tokenizer.chat_template is None:
        message = (
            "This model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE."
        )
        raise InvalidRequest(message, param="messages", code="no_chat_template")
    form = reasoning_of(serving)
    render = partial(render_chat, tokenizer.templates, options, format_of(serving))
    try:
        text = render() if size < THREAD_FROM else await serving.threads.run(render)
    except ChatTemplateError as error:
        message = f"The model's chat template does not take these messages: {error}"
        raise InvalidRequest(message, param="messages", code="chat_template_error") from None
    if counting:
        check_text(len(text), "messages")
    ids = await serving.encode(
        text, add_special_tokens=add_special_tokens, param=None if counting else "messages"
    )
    return ChatPrompt(ids, form is not None and form.is_open(text, _begun(options)))


def _begun(options: ChatOptions) -> str:
    """Return the text of the message that the answer continues, or ""."""
    if not options.continue_final_message or not options.messages:
        return ""
    content = options.messages[-1].for_template()["content"]
    return str(content[-1]["text"]) if content else ""
