"""`POST /completion` and `POST /infill`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.answers import BODY_ERRORS, answers
from ..core.errors import ApiError
from ..core.llama_cpp_errors import LlamaCppErrorAnswer, as_llama_cpp
from ..http.body import JsonRoute
from ..media.media import EncodedPrompt
from ..serving.collector import Collector, Update
from ..serving.kept_logprobs import check_logprobs
from ..serving.request_builder import WireNames, build_requests
from ..serving.sse import EventStream, event
from ..serving.state import DEFAULT_MODEL, THREAD_FROM, Serving, ServingDep, json_response
from .answers import CompletionAnswer, CompletionPiece, CompletionWriter
from .prompts import encoded_prompts, grammar_of, infill_prompt, sampling_of
from .requests import CompletionBody, GenerationBody, InfillBody

router = APIRouter(route_class=JsonRoute)
_NAMES = {"max_new_tokens": "n_predict", "repetition_penalty": "repeat_penalty",
          "logprobs": "n_probs"}  # fmt: skip
# With `response_fields` an answer is an object of the members that they name.
_Whole = CompletionAnswer | dict[str, Any]
_ANSWERS = answers(
    _Whole | list[_Whole],
    stream=CompletionPiece | CompletionAnswer | dict[str, Any] | LlamaCppErrorAnswer,
    errors=BODY_ERRORS,
    error=LlamaCppErrorAnswer,
)


@router.post("/completion", responses=_ANSWERS)
@router.post("/completions", responses=_ANSWERS)
async def completion(body: CompletionBody, serving: ServingDep) -> Response:
    """Continue one or more prompts. Several prompts are answered with a list."""
    serving.check_model(body.model or DEFAULT_MODEL)
    serving.check_room(len(body.prompt) * body.n_cmpl, "prompt")
    prompts = await encoded_prompts(serving, body.prompt)
    body.prompt.clear()
    return await _generate(serving, body, prompts, "prompt")


@router.post("/infill", responses=_ANSWERS)
async def infill(body: InfillBody, serving: ServingDep) -> Response:
    """Write the text between `input_prefix` and `input_suffix`."""
    serving.check_model(body.model or DEFAULT_MODEL)
    serving.check_room(body.n_cmpl, "n_cmpl")
    ids, stops = await infill_prompt(serving, body)
    body.input_extra.clear()
    return await _generate(serving, body, [EncodedPrompt(ids)], "input_prefix", stops)


async def _generate(
    serving: Serving,
    body: GenerationBody,
    prompts: Sequence[EncodedPrompt],
    name: str,
    stop_token_ids: Sequence[int] = (),
) -> Response:
    """Return the answer. `name` is the parameter of the prompts, for errors."""
    sampling = await sampling_of(serving, body, stop_token_ids)
    grammar = await grammar_of(serving, body)
    most, arrival = body.token_limit, time.monotonic()
    request_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[RequestState] = []
    for ids, images in prompts:
        requests += build_requests(
            serving,
            sampling,
            ids,
            [f"{request_id}-{len(requests) + sample}" for sample in range(body.n_cmpl)],
            names=WireNames(name, _NAMES),
            max_tokens=serving.limits.context_length if most is None else most,
            include_stop=False,
            priority=0,
            arrival_time=arrival,
            adapter=serving.adapter_of(body.model),
            images=images,
            belongs_to=frozenset({request_id}),
            min_new_tokens=0,
            seed=None if body.seed < 0 else body.seed,
            grammar=grammar,
            logprobs=body.n_probs or None,
        )
    if most is not None and not body.stream:
        check_logprobs(requests, "n_probs")
    decode = partial(serving.engine.tokenizer.decode, skip_special_tokens=False)
    texts = [
        decode(ids) if len(ids) < THREAD_FROM else await serving.threads.run(decode, ids)
        for ids, _ in prompts
    ]
    collector = Collector(serving, requests)
    writers = [
        CompletionWriter(
            serving, body, request, clock, index=index, prompt=texts[index // body.n_cmpl]
        )
        for index, (request, clock) in enumerate(zip(requests, collector.clocks, strict=True))
    ]
    if body.stream:
        return EventStream(collector, _Events(writers), serving)

    def write(outputs: list[RequestOutput]) -> Response:
        written = [writer.whole(output) for writer, output in zip(writers, outputs, strict=True)]
        content = written[0] if len(written) == 1 else msgspec.Raw(msgspec.json.encode(written))
        return json_response(content)

    with collector:
        return await collector.written(write)


class _Events:
    """Events with one piece each. There is no event after the last piece."""

    def __init__(self, writers: Sequence[CompletionWriter]) -> None:
        self._writers = writers

    def events(self, updates: list[Update]) -> bytes:
        return b"".join(
            [
                event(piece)
                for index, output in updates
                for piece in self._writers[index].pieces(output)
            ]
        )

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return event(as_llama_cpp(error.status, error.code, error.message))
