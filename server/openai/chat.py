"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, answers
from ..http.body import JsonRequest, JsonRoute
from ..parsing.events import Arguments, CallBegins, Event, Text, Thought
from ..serving.collector import Collector
from ..serving.sse import EventStream
from ..serving.state import Serving, ServingDep, json_response
from .answers import ChatCompletion, ChatCompletionChunk
from .chunks import ChunkWriter, head, usage_of
from .conversation import AnswerReader, Conversation, begin
from .generation import best
from .logprobs import TokenTrail, chat_logprobs, prompt_logprobs
from .requests import ChatCompletionRequest

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=ChatCompletionChunk, errors=BODY_ERRORS),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a conversation."""
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    conversation = await begin(serving, body, request_id, size=request.size)
    requests = conversation.requests
    if body.stream:
        start = head(serving, request_id, "chat.completion.chunk")
        chunks = _ChatChunks(serving, start, conversation, body)
        return EventStream(Collector(serving, requests), chunks, serving.metrics)
    with Collector(serving, requests) as collector:
        return await collector.written(
            lambda outputs: _completion(serving, body, conversation, request_id, outputs)
        )


def _completion(
    serving: Serving,
    body: ChatCompletionRequest,
    conversation: Conversation,
    request_id: str,
    outputs: list[RequestOutput],
) -> Response:
    """Return the answer of a request that does not stream."""
    tokenizer = serving.engine.tokenizer
    choices = [
        _choice(body, index, output, reader, TokenTrail(tokenizer, conversation.requests[0]))
        for index, (output, reader) in enumerate(
            zip(best(outputs, body.samples, body.n), conversation.readers, strict=False)
        )
    ]
    start = head(serving, request_id, "chat.completion")
    usage = chat_usage(
        conversation, tokenizer, body.samples, sum([one.completion_tokens for one in outputs])
    )
    of_prompt = prompt_logprobs(tokenizer, outputs[0].prompt_logprobs, body.prompt_logprobs)
    members = {} if of_prompt is None else {"prompt_logprobs": of_prompt}
    return json_response({**start, "choices": choices, "usage": usage, **members})


def chat_usage(
    conversation: Conversation, tokenizer: Tokenizer, samples: int, completion_tokens: int
) -> dict[str, Any]:
    """Return `usage`. For models that think it includes the number of thought tokens."""
    usage = usage_of(conversation.requests, samples, completion_tokens)
    if conversation.thinking is None:
        return usage
    details = {"reasoning_tokens": conversation.reasoning_tokens(tokenizer)}
    return {**usage, "completion_tokens_details": details}


def _choice(
    body: ChatCompletionRequest,
    index: int,
    output: RequestOutput,
    reader: AnswerReader,
    trail: TokenTrail,
) -> dict[str, Any]:
    events = reader.push(output)
    logprobs = None
    if body.logprobs:
        trail.push(output.logprobs or ())
        entries = [entry for event in events for entry in trail.read(event)]
        logprobs = chat_logprobs(entries + trail.rest())
    return {
        "index": index,
        "message": _message(Deltas().of(events), thoughts=body.include_reasoning),
        "logprobs": logprobs,
        "finish_reason": reader.reason(output),
    }


class Deltas:
    """Makes the deltas of one choice: thoughts, text, and calls, whose name comes first."""

    def __init__(self) -> None:
        self._calls = 0

    def of(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case Thought(text):
                # "reasoning_content" is DeepSeek's and SGLang's name, "reasoning" is vLLM's.
                return {"reasoning_content": text, "reasoning": text}
            case CallBegins(name):
                call = {
                    "index": self._calls,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                self._calls += 1
                return {"tool_calls": [call]}
            case Arguments(text):
                part = {"index": self._calls - 1, "function": {"arguments": text}}
                return {"tool_calls": [part]}


def _message(deltas: Sequence[dict[str, Any]], *, thoughts: bool) -> dict[str, Any]:
    """Return the message that the deltas add up to."""
    content = "".join([delta.get("content", "") for delta in deltas])
    thought = "".join([delta.get("reasoning", "") for delta in deltas])
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": [],
    }
    if thought and thoughts:
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


class _ChatChunks(ChunkWriter):
    """Chunks of a streamed chat completion.

    Each choice begins with a chunk with the role. Chunks with thoughts, text and calls follow, and
    a chunk with the finish reason ends the choice.
    """

    def __init__(
        self,
        serving: Serving,
        start: dict[str, Any],
        conversation: Conversation,
        body: ChatCompletionRequest,
    ) -> None:
        requests = conversation.requests
        super().__init__(serving, start, requests, body, is_plain=conversation.is_plain)
        self._conversation = conversation
        self._thoughts = body.include_reasoning
        self._deltas = [Deltas() for _ in requests]
        self._trails = (
            [TokenTrail(serving.engine.tokenizer, request) for request in requests]
            if body.logprobs
            else None
        )

    def opening(self, index: int) -> dict[str, Any]:
        return _delta(index, {"role": "assistant", "content": ""})

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        reader = self._conversation.readers[index]
        trail = self._trails[index] if self._trails is not None else None
        if trail is not None:
            trail.push(output.logprobs or ())
        choices = []
        for event in reader.push(output):
            entries = trail.read(event) if trail is not None else []
            if self._thoughts or not isinstance(event, Thought):
                choices += [
                    _delta(index, delta, entries) for delta in self._deltas[index].of([event])
                ]
        if output.finish_reason is not None:
            rest = trail.rest() if trail is not None else []
            choices.append({**_delta(index, {}, rest), "finish_reason": reader.reason(output)})
        return choices

    def usage(self) -> dict[str, Any]:
        return chat_usage(self._conversation, self._tokenizer, self._samples, self.told_tokens)


def _delta(
    index: int, delta: dict[str, Any], logprobs: Sequence[msgspec.Raw] = ()
) -> dict[str, Any]:
    content = chat_logprobs(logprobs) if logprobs else None
    return {"index": index, "delta": delta, "logprobs": content, "finish_reason": None}
