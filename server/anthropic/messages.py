"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.output_processor import RequestOutput
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, answers
from ..core.anthropic_errors import OVERLOADED, PATH
from ..core.errors import REQUEST_ID, ApiError
from ..http.body import JsonRequest, JsonRoute
from ..openai.conversation import Conversation, begin, chat_prompt
from ..serving.collector import Collector, Update, generate_all
from ..serving.sse import EventStream, named_event
from ..serving.state import Serving, ServingDep, json_response
from .answers import InputTokens, MessageAnswer, MessagesErrorAnswer, StreamEvent
from .content import ContentStream, content_of
from .requests import CountTokensRequest, MessagesRequest
from .to_chat import chat_options, chat_request

logger = logging.getLogger(__name__)

router = APIRouter(route_class=JsonRoute)
_PING = named_event("ping", {"type": "ping"})
_ERRORS = (*BODY_ERRORS, OVERLOADED)


@router.post(
    PATH,
    responses=answers(MessageAnswer, stream=StreamEvent, errors=_ERRORS, error=MessagesErrorAnswer),
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
    chat = chat_request(body)
    body.messages.clear()  # The chat has a copy.
    conversation = await begin(serving, chat, message_id, size=request.size)
    answer = _Answer(serving, conversation, message_id, body.max_tokens)
    if body.stream:
        events = _MessageEvents(answer, request.scope.get(REQUEST_ID, ""))
        collector = Collector(serving, conversation.requests)
        return EventStream(collector, events, serving.metrics, keep_alive=_PING)
    (output,) = await generate_all(serving, conversation.requests)
    content = content_of(answer.reader.push(output))
    return json_response({**answer.head, "content": content, **answer.end(output)})


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
    return json_response({"input_tokens": len(prompt.ids)})


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
        self._limit = "max_tokens"
        if max_tokens > self._request.params.max_new_tokens:
            self._limit = "model_context_window_exceeded"
        self.head = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": serving.model_name,
        }

    def usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return the usage up to now. `input_tokens` excludes tokens found in the cache."""
        return {
            "input_tokens": output.prompt_tokens - output.cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.cached_tokens,
            "output_tokens": output.completion_tokens,
            "output_tokens_details": None,
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": "standard",
        }

    def end(self, output: RequestOutput) -> dict[str, Any]:
        """Return the reason for the end of the answer, and `usage`."""
        usage = self.usage(output)
        if self._conversation.thinking is not None:
            thinking = self._conversation.reasoning_tokens(self._tokenizer)
            usage["output_tokens_details"] = {"thinking_tokens": thinking}
        return {**self._stop(output), "usage": usage}

    def _stop(self, output: RequestOutput) -> dict[str, Any]:
        sequence = None
        if isinstance(output.matched_stop, str):
            reason, sequence = "stop_sequence", output.matched_stop
        elif output.finish_reason is FinishReason.LENGTH:
            reason = self._limit
        elif output.finish_reason is FinishReason.ABORT:
            # The client may send the answer back to continue it.
            reason = "pause_turn"
        else:
            reason = "tool_use" if self.reader.has_called else "end_turn"
        told = {"stop_reason": reason, "stop_sequence": sequence}
        return {**told, "stop_details": None, "container": None}


class _MessageEvents:
    """The events of a streamed message: its start, its content and its end."""

    def __init__(self, answer: _Answer, request_id: str) -> None:
        self._answer = answer
        self._request_id = request_id
        self._content = ContentStream()
        self._begun = False

    def events(self, updates: list[Update]) -> bytes:
        told: list[dict[str, Any]] = []
        for _, output in updates:
            if not self._begun:
                told += self._begin(output)
            for event in self._answer.reader.push(output):
                told += self._content.of(event)
            if output.finish_reason is not None:
                told += self._content.close()
                end = self._answer.end(output)
                usage = end.pop("usage")
                told.append({"type": "message_delta", "delta": end, "usage": usage})
        return b"".join([named_event(event["type"], event) for event in told])

    def end(self) -> bytes:
        return named_event("message_stop", {"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return named_event("error", error.told(PATH, self._request_id)[1])

    def _begin(self, output: RequestOutput) -> list[dict[str, Any]]:
        self._begun = True
        message: dict[str, Any] = {
            **self._answer.head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._answer.usage(output),
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]
