"""A chat becomes requests of the engine, and their outputs become thoughts, calls and content.

All endpoint families whose bodies become a chat use this.

    conversation = await begin(serving, body, request_id, size=request.size)
    with Collector(serving, conversation.requests) as collector:
        ...
        for event in conversation.readers[index].push(output):
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from ...runtime.core.generation import FinishReason
from ...runtime.core.images import ImageInput
from ...runtime.tokenizer.chat_template import ChatTemplateError
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.errors import InvalidRequest
from ..core.limits import check_text
from ..media.parts import NOTE, ImagePart
from ..parsing.choice import choose_reasoning
from ..parsing.events import CallBegins, Event, Parser, PlainText
from ..parsing.reasoning import ReasoningFormat
from ..serving.state import THREAD_FROM, Serving
from .generation import generation_requests, prediction_ids
from .kept_prefixes import KeptPrefixes
from .rendering import render_chat
from .requests import ChatCompletionRequest, ChatOptions
from .tools import chat_grammar, format_of, tool_use

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
    """How the answers of one chat think. If `is_open`, they begin within a thought."""

    form: ReasoningFormat
    is_open: bool


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
        form, is_open = self.thinking
        for index, request in enumerate(self.requests):
            thoughts, tokens = self.counted.get(index, (0, 0))
            ids = request.output_ids
            if len(ids) > tokens and not 0 < thoughts < tokens:
                thoughts = form.count_tokens(tokenizer, ids, is_open=is_open)
                self.counted[index] = thoughts, len(ids)
        return sum(thoughts for thoughts, _ in self.counted.values())


async def begin(
    serving: Serving,
    body: ChatCompletionRequest,
    request_id: str,
    *,
    size: int,
    kept: KeptPrefixes | None = None,
) -> Conversation:
    """Return the conversation of a request. `size` is the size of the request's body in bytes.

    `kept` are prefixes of the prompt that the client wants kept.

    Raise `InvalidRequest`, and the errors of `Serving.check_room`.
    """
    serving.check_model(body.model)
    serving.check_room(body.samples, "n")
    tokenizer = serving.engine.tokenizer
    prompt = await chat_prompt(serving, body, size=size, add_special_tokens=body.add_special_tokens)
    ids, opens_thought, images, _ = prompt
    keep = [] if kept is None else await _find_prefixes(serving, kept, prompt, size=size)
    use, form = tool_use(serving, body), reasoning_of(serving)
    thinking = form and Thinking(form, opens_thought)
    grammar = await chat_grammar(serving, body, use)
    if grammar is not None and form is not None:
        special = tokenizer.special_ids(form.marks)
        grammar = form.grammar(
            grammar, is_open=opens_thought, special=special, has_calls=use is not None
        )
    # Parsers must see the special tokens that mark thoughts and calls.
    marks = (*(form.marks if form else ()), *(use.form.marks if use else ()))
    visible = frozenset(tokenizer.special_ids(marks).values())
    more: dict[str, Any] = {"images": images, "keep": keep}
    if body.thinking_budget is not None and form is not None:
        more |= form.budget(tokenizer, body.thinking_budget[1], is_open=opens_thought)
    prediction = await prediction_ids(serving, body)
    requests = generation_requests(
        serving, body, request_id, [ids], grammar, visible, prediction, **more
    )
    # The messages are in the prompt now. Free their memory, because the answer may take minutes.
    body.messages.clear()
    body.chat_template_kwargs.clear()
    separate = form if body.separate_reasoning else None
    readers = []
    for _ in requests:
        parser: Parser = PlainText() if use is None else use.parser()
        if separate is not None:
            parser = separate.parser(parser, is_open=opens_thought)
        readers.append(AnswerReader(parser))
    is_plain = use is None and separate is None
    return Conversation(requests, readers, thinking, is_plain, {})


def reasoning_of(serving: Serving) -> ReasoningFormat | None:
    """Return the reasoning format of the served model, or None if it does not think."""
    return choose_reasoning(serving.config.reasoning_parser, serving.engine.tokenizer.templates)


class ChatPrompt(NamedTuple):
    """Token ids of a prompt, its images, and its text. If `opens_thought`, the ids end within a
    thought that the answer continues.
    """

    ids: list[int]
    opens_thought: bool
    images: Sequence[ImageInput]
    text: str


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
    form = reasoning_of(serving)
    text, parts = await chat_text(serving, options, size=size)
    if counting:
        check_text(len(text), "messages")
    images: Sequence[ImageInput] = ()
    if parts:
        ids, images = await serving.encode_with_images(
            text, parts, "messages", add_special_tokens=add_special_tokens, counting=counting
        )
    else:
        ids = await serving.encode(
            text,
            add_special_tokens=add_special_tokens,
            param=None if counting else "messages",
        )
    begun = ""  # The text of the message that the answer continues.
    if options.continue_final_message and options.messages:
        content = options.messages[-1].for_template()["content"]
        begun = str(content[-1].get("text", "")) if content else ""
    return ChatPrompt(ids, form is not None and form.is_open(text, begun), images, text)


async def _find_prefixes(
    serving: Serving, kept: KeptPrefixes, prompt: ChatPrompt, *, size: int
) -> list[tuple[int, float]]:
    """Return the numbers of tokens of the prefixes, and for how many seconds they are kept."""
    found = [(len(prompt.ids), kept.whole)] if kept.whole else []
    if kept.options is None:
        return found
    try:
        marked, _ = await chat_text(serving, kept.options, size=size)
    except InvalidRequest:
        # The template looks at the beginning or the length of a text. A mark must not change the
        # answer.
        return found
    finally:
        kept.options.messages.clear()
    placeholder = ""
    if prompt.images:
        placeholder = (await serving.media_for("messages").ready()).placeholder
    find = partial(
        kept.found,
        serving.engine.tokenizer,
        prompt.text,
        marked,
        prompt.ids,
        prompt.images,
        placeholder,
    )
    return found + (find() if size < THREAD_FROM else await serving.threads.run(find))


async def chat_text(
    serving: Serving, options: ChatOptions, *, size: int
) -> tuple[str, list[ImagePart]]:
    """Return the text of a chat's prompt, and its images in their order there. See `chat_prompt`.

    Each image has the name of its parameter. If the model reads no images, those in results of
    tools become notes for the model. Raise `InvalidRequest` for others, and for too many images.
    """
    found: list[ImagePart] = []
    for index, message in enumerate(options.messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, str):
                continue
            part.param = part.param or f"messages[{index}].content[{place}].image_url"
            if serving.media is None and message.role == "tool":
                assert isinstance(message.content, list)
                message.content[place] = NOTE
                continue
            found.append(part)
    if found:
        serving.media_for(found[0].param).check_count(found)
    tokenizer = serving.engine.tokenizer
    if tokenizer.chat_template is None:
        raise InvalidRequest(
            "This model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE.",
            param="messages",
            code="no_chat_template",
        )
    placeholder = ""
    if found:
        placeholder = (await serving.media_for("messages").ready()).placeholder
    render = partial(render_chat, tokenizer.templates, options, format_of(serving), placeholder)
    try:
        text, order = render() if size < THREAD_FROM else await serving.threads.run(render)
    except ChatTemplateError as error:
        raise InvalidRequest(
            f"The model's chat template does not take these messages: {error}",
            param="messages",
            code="chat_template_error",
        ) from None
    return text, [found[number] for number in order]
