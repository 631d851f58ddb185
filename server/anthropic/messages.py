"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import logging
import uuid
from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.output_processor import RequestOutput
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.anthropic_errors import OVERLOADED, PATH, MessagesErrorAnswer
from ..core.errors import REQUEST_ID, ApiError
from ..http.body import JsonRequest, JsonRoute
from ..openai.conversation import Conversation, begin, chat_prompt
from ..serving.collector import Collector, Update, generate_all
from ..serving.sse import EventStream, named_event
from ..serving.state import Serving, ServingDep, json_response
from .cache_control import HOUR, kept_prefixes
from .content import Content, ContentEvent, ContentStream, content_of
from .requests import CountTokensRequest, MessagesRequest
from .to_chat import chat_options, chat_request

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JsonRoute)
_ERRORS = (*BODY_ERRORS, OVERLOADED)
StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]


class InputTokens(Answer):
    input_tokens: int


class MessageTokensDetails(Answer):
    thinking_tokens: int


class CacheCreation(Answer):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(Answer, kw_only=True):
    """Token counts.

    `input_tokens` excludes tokens found in the cache, and those before the last `cache_control`,
    which the cache keeps. `output_tokens_details` is set for models
    that think.
    """

    input_tokens: int
    cache_creation: CacheCreation
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(Answer, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class MessageStart(Answer, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class Ping(Answer):
    type: Literal["ping"] = "ping"


class StopDelta(Answer):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(Answer, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Answer):
    type: Literal["message_stop"] = "message_stop"


MessageEvent = MessageStart | Ping | ContentEvent | MessageDelta | MessageStop | MessagesErrorAnswer
PING = named_event("ping", Ping())


@router.post(
    PATH,
    responses=answers(
        MessageAnswer, stream=MessageEvent, errors=_ERRORS, error=MessagesErrorAnswer
    ),
)
async def create_message(
    body: MessagesRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a conversation in Anthropic's format."""
    message_id = f"msg_{uuid.uuid4().hex}"
    if body.left_out:
        logger.info(
            "%s: tools and blocks of a server are left out: %s", PATH, ", ".join(body.left_out)
        )
    chat, kept = chat_request(body), kept_prefixes(body)
    body.messages.clear()  # The chat has a copy.
    conversation = await begin(serving, chat, message_id, size=request.size, kept=kept)
    answer = _Answer(serving, conversation, message_id, body.max_tokens)
    if body.stream:
        events = _MessageEvents(answer, request.scope.get(REQUEST_ID, ""))
        collector = Collector(serving, conversation.requests)
        return EventStream(collector, events, serving, ping=PING)
    (output,) = await generate_all(serving, conversation.requests)
    message = answer.message(output)
    message.content = content_of(answer.reader.push(output))
    stop = answer.stop(output)
    message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
    message.usage = answer.last_usage(output)
    return json_response(message)


@router.post(
    f"{PATH}/count_tokens",
    responses=answers(InputTokens, errors=_ERRORS, error=MessagesErrorAnswer),
)
async def count_tokens(
    body: CountTokensRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Count the tokens of a conversation's prompt."""
    serving.check_model(body.model)
    prompt = await chat_prompt(
        serving, chat_options(body), size=request.size, add_special_tokens=False, counting=True
    )
    return json_response(InputTokens(len(prompt.ids)))


class _Answer:
    """The parts of one message besides its content."""

    def __init__(
        self, serving: Serving, conversation: Conversation, message_id: str, max_tokens: int
    ) -> None:
        """If `max_tokens` exceeds the rest of the context, the rest is the limit, as in Anthropic's
        newer models.
        """
        (self._request,) = conversation.requests
        (self.reader,) = conversation.readers
        self._conversation = conversation
        self._tokenizer: Tokenizer = serving.engine.tokenizer
        self._page_size = serving.info.page_size
        self._kept = [] if serving.config.engine.disable_radix_cache else self._request.keep
        self._limit: StopReason = "max_tokens"
        if max_tokens > self._request.params.max_new_tokens:
            self._limit = "model_context_window_exceeded"
        self._id, self._model = message_id, self._request.adapter_name or serving.model_name

    def message(self, output: RequestOutput) -> MessageAnswer:
        """Return the message without content and without a reason for its end."""
        return MessageAnswer(id=self._id, model=self._model, content=[], usage=self._usage(output))

    def _usage(self, output: RequestOutput) -> MessageUsage:
        created, of_hour = self._created(output, 0.0), self._created(output, HOUR)
        return MessageUsage(
            input_tokens=output.prompt_tokens - output.cached_tokens - created,
            cache_creation=CacheCreation(created - of_hour, of_hour),
            cache_creation_input_tokens=created,
            cache_read_input_tokens=output.cached_tokens,
            output_tokens=output.completion_tokens,
        )

    def _created(self, output: RequestOutput, seconds: float) -> int:
        """Return the computed tokens of the prefixes that are kept for this time at least."""
        size = self._page_size
        ends = (tokens // size * size for tokens, time in self._kept if time >= seconds)
        end = max(ends, default=0)
        return max(0, end - output.cached_tokens)

    def last_usage(self, output: RequestOutput) -> MessageUsage:
        """Return the usage at the end of the answer."""
        usage = self._usage(output)
        if self._conversation.thinking is not None:
            thinking = self._conversation.reasoning_tokens(self._tokenizer)
            usage.output_tokens_details = MessageTokensDetails(thinking)
        return usage

    def stop(self, output: RequestOutput) -> StopDelta:
        """Return the reason for the end of the answer."""
        if isinstance(output.matched_stop, str):
            return StopDelta("stop_sequence", output.matched_stop)
        if output.finish_reason is FinishReason.LENGTH:
            return StopDelta(self._limit, None)
        if output.finish_reason is FinishReason.ABORT:
            # The client may send the answer back to continue it.
            return StopDelta("pause_turn", None)
        return StopDelta("tool_use" if self.reader.has_called else "end_turn", None)


class _MessageEvents:
    """The events of a streamed message: its start, its content and its end."""

    def __init__(self, answer: _Answer, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id
        self._content = ContentStream()
        self._has_begun = False

    def events(self, updates: list[Update]) -> bytes:
        new: list[MessageEvent] = []
        for _, output in updates:
            if not self._has_begun:
                self._has_begun = True
                new += [MessageStart(message=self._answer.message(output)), Ping()]
            for event in self._answer.reader.push(output):
                new += self._content.of(event)
            if output.finish_reason is not None:
                new += self._content.close()
                stop, usage = self._answer.stop(output), self._answer.last_usage(output)
                new.append(MessageDelta(delta=stop, usage=usage))
        return b"".join([named_event(event.type, event) for event in new])

    def end(self) -> bytes:
        return named_event("message_stop", MessageStop())

    def error(self, error: ApiError) -> bytes:
        return named_event("error", error.answer_for(PATH, self._request_id)[1])
