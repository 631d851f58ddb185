"""`POST /api/chat` and `/api/generate`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.answers import BODY_ERRORS, LINES, answers
from ..core.errors import ApiError
from ..core.ollama_errors import OllamaErrorAnswer
from ..http.body import CurlJsonRoute, JsonRequest
from ..openai.conversation import AnswerReader, begin
from ..openai.generation import generation_requests
from ..openai.infill import with_suffix
from ..openai.logprobs import TokenTrail
from ..openai.requests import ChatCompletionRequest
from ..parsing.events import PlainText
from ..serving.collector import Collector, Update
from ..serving.sse import EventStream, encode_json
from ..serving.state import Serving, ServingDep, json_response
from ..serving.structured import grammar_of
from .answers import (
    ContentReader,
    OllamaAnswer,
    OllamaChat,
    OllamaContent,
    OllamaGeneration,
    Part,
    chat_answer,
    done_reason,
    generate_answer,
    joined,
)
from .requests import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from .to_openai import chat_request, completion_request, ollama_names, prompt_chat

router = APIRouter(route_class=CurlJsonRoute)
# A line of JSON may begin with blanks, so these keep a silent stream open.
BLANK = b" "
MakeAnswer = Callable[..., OllamaAnswer]
Generation = tuple[RequestState, AnswerReader]


@router.post(
    "/api/chat",
    responses=answers(
        OllamaChat,
        lines=OllamaChat | OllamaErrorAnswer,
        errors=BODY_ERRORS,
        error=OllamaErrorAnswer,
    ),
)
async def chat(body: OllamaChatRequest, request: JsonRequest, serving: ServingDep) -> Response:
    """Answer a conversation in Ollama's format."""
    began = time.monotonic()
    if not body.messages:
        return _loaded(serving, body, chat_answer)
    with ollama_names():
        asked = chat_request(serving, body)
        body.messages.clear()  # The chat has a copy.
        generation = await _of_chat(serving, asked, request.size)
    return await _answer(serving, body, generation, chat_answer, began)


@router.post(
    "/api/generate",
    responses=answers(
        OllamaGeneration,
        lines=OllamaGeneration | OllamaErrorAnswer,
        errors=BODY_ERRORS,
        error=OllamaErrorAnswer,
    ),
)
async def generate(
    body: OllamaGenerateRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a prompt, by the model's chat template or as it is."""
    began = time.monotonic()
    if not body.prompt:
        return _loaded(serving, body, generate_answer)
    with ollama_names():
        if body.is_plain:
            generation = await _plain(serving, body)
        else:
            generation = await _of_chat(serving, prompt_chat(serving, body), request.size)
    return await _answer(serving, body, generation, generate_answer, began)


def _loaded(serving: Serving, body: OllamaBody, make: MakeAnswer) -> Response:
    """Answer a request without text, by which clients load a model. It is loaded already."""
    serving.check_model(body.model)
    serving.check_room(1, "model")
    return json_response(make(OllamaContent(), model=body.model, done=True, done_reason="load"))


async def _of_chat(serving: Serving, asked: ChatCompletionRequest, size: int) -> Generation:
    conversation = await begin(serving, asked, f"ollama-{uuid.uuid4().hex}", size=size)
    return conversation.requests[0], conversation.readers[0]


async def _plain(serving: Serving, body: OllamaGenerateRequest) -> Generation:
    asked = completion_request(serving, body)
    serving.check_model(asked.model)
    serving.check_room(1, "prompt")
    prompts = await serving.prompt_ids(asked.prompt, "prompt")
    if asked.suffix:
        asked, prompts = await with_suffix(serving, asked, prompts)
    grammar = await grammar_of(serving, asked)
    (found,) = generation_requests(serving, asked, f"ollama-{uuid.uuid4().hex}", prompts, grammar)
    return found, AnswerReader(PlainText())


async def _answer(
    serving: Serving, body: OllamaBody, generation: Generation, make: MakeAnswer, began: float
) -> Response:
    request, reader = generation
    collector = Collector(serving, [request])
    trail = TokenTrail(serving.engine.tokenizer, request) if body.logprobs else None
    content = ContentReader(reader, trail, uuid.uuid4().hex[:12])
    writer = _Writer(body.model, make, content, collector, began)
    if body.stream:
        return _LineStream(collector, writer, serving, ping=BLANK)
    with collector:
        return await collector.written(lambda outputs: json_response(writer.whole(outputs[0])))


class _Writer:
    """Writes one answer, whole or line by line."""

    def __init__(
        self,
        model: str,
        make: MakeAnswer,
        content: ContentReader,
        collector: Collector,
        began: float,
    ) -> None:
        """`began` is the time at which the request arrived."""
        self._model, self._make, self._content = model, make, content
        self._clocks = collector.clocks
        self._began = began

    def whole(self, output: RequestOutput) -> OllamaAnswer:
        part = joined([*self._content.read(output)])
        return self._object(part, done=True, **self._figures(output))

    def events(self, updates: list[Update]) -> bytes:
        found = []
        for _, output in updates:
            found += [self._object(part) for part in self._content.read(output)]
            if output.finish_reason is not None:
                last = self._object((OllamaContent(), ()), done=True, **self._figures(output))
                found.append(last)
        return b"".join([encode_json(each) + b"\n" for each in found])

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return encode_json(OllamaErrorAnswer(error.message)) + b"\n"

    def _object(self, part: Part, **members: Any) -> OllamaAnswer:
        content, entries = part
        logprobs: Any = [*entries] or UNSET
        return self._make(content, model=self._model, logprobs=logprobs, **members)

    def _figures(self, output: RequestOutput) -> dict[str, Any]:
        """Return the members of the last object."""
        (clock,) = self._clocks
        end = time.monotonic()
        first = clock.first_token or end
        started = clock.started or first
        return {
            "done_reason": done_reason(output),
            "total_duration": _nanoseconds(self._began, end),
            "load_duration": _nanoseconds(self._began, started),
            "prompt_eval_count": output.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(started, first),
            "eval_count": output.completion_tokens,
            "eval_duration": _nanoseconds(first, clock.last_token or end),
        }


def _nanoseconds(begin: float, end: float) -> int:
    # Clients divide by a duration.
    return max(1, round((end - begin) * 1e9))


class _LineStream(EventStream):
    """A stream of lines of JSON."""

    media_type = LINES
