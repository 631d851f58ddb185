"""From a conversation to the engine's requests, and from its outputs to what the model says, thinks
and calls: one way for chat completions and every endpoint family whose bodies become one.

    conversation = await begin(serving, body, request_id, size=request.size)
    with Collector(serving, conversation.requests) as collector:
        ...
        for event in conversation.readers[index].push(output):
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

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
from .protocol import ChatCompletionRequest, ChatOptions
from .rendering import render_chat
from .tools import ToolUse, chat_grammar, format_of, tool_use


class AnswerReader:
    """Reads one sequence: its outputs become events. `has_called`: whether a call has begun."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.has_called = False

    def push(self, output: RequestOutput) -> list[Event]:
        """What is new, certain or, with the last output, all the rest."""
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish(is_cut=output.finish_reason != FinishReason.STOP)
        self.has_called |= any(isinstance(event, CallBegins) for event in events)
        return events

    def reason(self, output: RequestOutput) -> str | None:
        """OpenAI's `finish_reason`."""
        if self.has_called and output.finish_reason == FinishReason.STOP:
            return "tool_calls"
        return output.finish_reason


class Thinking(NamedTuple):
    """How one chat's answers think. `is_open`: they begin within a thought; `is_apart`: it is no
    part of the text.
    """

    form: ReasoningFormat
    is_open: bool
    is_apart: bool


class Conversation(NamedTuple):
    """One chat, ready to be generated: `samples` sequences, each with its reader. `is_plain`: what
    comes is text and nothing else. `counted`: by sequence how many of its tokens were thoughts,
    and of how many.
    """

    requests: list[RequestState]
    readers: list[AnswerReader]
    thinking: Thinking | None
    is_plain: bool
    counted: dict[int, tuple[int, int]]

    def reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """How many tokens so far are thoughts. Only sequences that have grown are counted again,
        and none whose thought has ended.
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
    """What the engine is to be asked. Raises `InvalidRequest`, and what `Serving.check_room` does.

    `size`: bytes of the body that it came in.
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
    # They are in the prompt now, and the answer may take minutes.
    body.messages.clear()
    body.chat_template_kwargs.clear()
    readers = [AnswerReader(_parser(thinking, use)) for _ in requests]
    is_plain = use is None and not (thinking and thinking.is_apart)
    return Conversation(requests, readers, thinking, is_plain, {})


def reasoning_of(serving: Serving) -> ReasoningFormat | None:
    """How the served model thinks, if it does."""
    return choose_reasoning(serving.config.reasoning_parser, serving.engine.tokenizer.templates)


def _budget(
    tokenizer: Tokenizer, body: ChatCompletionRequest, thinking: Thinking | None
) -> dict[str, Any]:
    """What bounds the thought; nothing for a model that does not think."""
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
    """Special tokens that a parser must see."""
    marks = (*(thinking.form.marks if thinking else ()), *(use.form.marks if use else ()))
    return frozenset(tokenizer.special_ids(marks).values())


class ChatPrompt(NamedTuple):
    """Token ids, and whether they end within a thought, which the answer goes on with."""

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
    """A conversation by the model's chat template. Raises `InvalidRequest`.

    `size`: bytes of the body that it came in. `counting`: it may be longer than the context.
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
    """The text of the message that the answer goes on with, if it goes on with one."""
    if not options.continue_final_message or not options.messages:
        return ""
    content = options.messages[-1].for_template()["content"]
    return str(content[-1]["text"]) if content else ""
