"""SGLang's `POST /generate`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...runtime.core.generation import FinishReason, TokenLogprob
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, Answer, ErrorAnswer, answers
from ..core.errors import ApiError
from ..http.body import JsonRoute
from ..media.media import EncodedPrompt
from ..openai.logprobs import finite, token_text
from ..serving.cached_tokens import CachedTokensDetails, cached_tokens_details
from ..serving.collector import Collector, Update, generate_all
from ..serving.kept_logprobs import check_logprobs
from ..serving.request_builder import WireNames, build_requests, check_prompt_logprobs
from ..serving.sse import DONE, EventStream, event
from ..serving.state import DEFAULT_MODEL, Serving, ServingDep, json_response
from ..serving.structured import grammar_of
from .requests import GenerateBody

router = APIRouter(route_class=JsonRoute)
T = TypeVar("T")
Triple = tuple[float | None, int, str | None]  # Log-probability, token id, text or null.


class StoppedBy(Answer, kw_only=True):
    type: Literal["stop"] = "stop"
    matched: str | int | None


class ReachedLength(Answer, kw_only=True):
    type: Literal["length"] = "length"
    length: int


class Aborted(Answer, kw_only=True):
    type: Literal["abort"] = "abort"
    message: str


class MetaInfo(Answer):
    """The latency is set at the end. Log-probabilities are set if the request asks for them, and
    `cached_tokens_details` if some of the cached tokens came from a lower tier, and `image_tokens`
    for prompts with images.
    """

    id: str
    finish_reason: StoppedBy | ReachedLength | Aborted | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET


class Generated(Answer):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedSoFar(Generated):
    """`index` is the number of the sequence, if there are several."""

    index: int | UnsetType = UNSET


_ANSWERS = answers(
    Generated | list[Generated], stream=GeneratedSoFar | ErrorAnswer, errors=BODY_ERRORS
)


@router.post("/generate", responses=_ANSWERS)
@router.put("/generate", responses=_ANSWERS)
async def generate(body: GenerateBody, serving: ServingDep) -> Response:
    """Continue one or more prompts."""
    requests = await _requests(serving, body)
    answers = [
        _Answer(serving.engine.tokenizer, sequence, with_text=body.return_text_in_logprobs)
        for sequence in requests
    ]
    single = len(requests) == 1 and not body.batch
    if body.stream:
        events = _AnswerEvents(answers, single=single)
        # Each piece contains all previous pieces.
        collector = Collector(serving, requests, keeps_all=True)
        return EventStream(collector, events, serving)
    outputs = await generate_all(serving, requests)
    whole = [answer.add(output) for answer, output in zip(answers, outputs, strict=True)]
    return json_response(whole[0] if single else whole)


async def _requests(serving: Serving, body: GenerateBody) -> list[RequestState]:
    """Return the sequences, prompt by prompt.

    Raise `InvalidRequest`, or `NotFound` for a key that may not use the model.
    """
    serving.check_model(DEFAULT_MODEL)
    prompt = "text" if body.input_ids is None else "input_ids"
    names = WireNames(
        prompt,
        {"prompt_logprobs": "top_logprobs_num", "logprobs": "top_logprobs_num"},
    )
    each = [_nth(body.sampling_params, index) for index in range(len(body.prompts))]
    serving.check_room(sum(sampling.n for sampling in each), prompt)
    prompts = [await _encoded(serving, body, index, prompt) for index in range(len(each))]
    arrival = time.monotonic()
    requests: list[RequestState] = []
    bounded: list[RequestState] = []
    for index, ((ids, images), sampling) in enumerate(zip(prompts, each, strict=True)):
        rid, adapter = _rid(body, index), _nth(body.lora_path, index)
        n, length = sampling.n, sampling.max_new_tokens
        samples = build_requests(
            serving,
            sampling,
            ids,
            [rid] if n == 1 else [f"{rid}-{sample}" for sample in range(n)],
            names=names,
            max_tokens=serving.limits.context_length if length is None else length,
            include_stop=sampling.no_stop_trim,
            priority=body.priority,
            arrival_time=arrival,
            adapter=None if adapter is None else serving.adapter_for(None, adapter),
            images=images,
            belongs_to=frozenset({rid, body.rid} if isinstance(body.rid, str) else {rid}),
            min_new_tokens=sampling.min_new_tokens,
            seed=sampling.sampling_seed,
            grammar=await grammar_of(serving, sampling),
            **_logprobs(body, index, len(ids)),
        )
        requests += samples
        bounded += samples if length is not None else []
    check_prompt_logprobs(requests, "top_logprobs_num", streamed=body.stream)
    check_logprobs(bounded, "top_logprobs_num")
    return requests


async def _encoded(serving: Serving, body: GenerateBody, index: int, name: str) -> EncodedPrompt:
    """Return a prompt, whose text has the model's placeholder for each of its images."""
    prompt = body.prompts[index]
    if not isinstance(prompt, str):
        return EncodedPrompt(prompt)
    parts = body.images(index)
    if not parts:
        return EncodedPrompt(await serving.encode(prompt, add_special_tokens=True, param=name))
    serving.media_for(parts[0].param).check_count(parts)
    return await serving.encode_with_images(prompt, parts, name, add_special_tokens=True)


def _logprobs(body: GenerateBody, index: int, prompt_tokens: int) -> dict[str, Any]:
    """Return the parameters of log-probabilities.

    The prompt's log-probabilities start at `logprob_start_len`, unless that is -1 or after its end.
    """
    if not _nth(body.return_logprob, index):
        return {}
    top, start = _nth(body.top_logprobs_num, index), _nth(body.logprob_start_len, index)
    if not 0 <= start < prompt_tokens:
        return {"logprobs": top}
    return {"logprobs": top, "prompt_logprobs": top, "prompt_logprobs_start": start}


def _nth(values: list[T], index: int) -> T:
    """Return the value for prompt `index`. A single value is for all prompts."""
    return values[0] if len(values) == 1 else values[index]


def _rid(body: GenerateBody, index: int) -> str:
    match body.rid:
        case None:
            return uuid.uuid4().hex
        case str():
            return f"{body.rid}-{index}" if body.batch else body.rid
        case _:
            return body.rid[index]


class _Answer:
    """The answer of one sequence. As in SGLang, each piece contains all previous output."""

    def __init__(self, tokenizer: Tokenizer, request: RequestState, *, with_text: bool) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._with_text = with_text
        self._text = ""
        self._output_ids: list[int] = []
        self._input_logprobs: list[Triple] = []
        self._input_top: list[list[Triple] | None] = []
        self._output_logprobs: list[Triple] = []
        self._output_top: list[list[Triple] | None] = []

    def add(self, output: RequestOutput) -> Generated:
        """Add output and return the answer up to now."""
        self._text += output.text
        self._output_ids += output.token_ids
        self._add_logprobs(output)
        meta = MetaInfo(
            self._request.name,
            _finish_reason(output),
            output.prompt_tokens,
            output.completion_tokens,
            output.cached_tokens,
            cached_tokens_details([self._request]),
            self._request.image_tokens or UNSET,
        )
        if output.finish_reason is not None:
            meta.e2e_latency = time.monotonic() - self._request.arrival_time
        if self._request.params.logprobs is not None:
            meta.input_token_logprobs = self._input_logprobs
            meta.output_token_logprobs = self._output_logprobs
            if self._request.params.logprobs > 0:
                meta.input_top_logprobs = self._input_top
                meta.output_top_logprobs = self._output_top
        return Generated(self._text, self._output_ids, meta)

    def _add_logprobs(self, output: RequestOutput) -> None:
        start = self._request.params.prompt_logprobs_start
        for token_id, entry in zip(
            self._request.prompt_ids[start:], output.prompt_logprobs or (), strict=False
        ):
            self._input_logprobs.append(
                self._triple(token_id, None if entry is None else entry.logprob)
            )
            self._input_top.append(self._top(entry))
        for entry in output.logprobs or ():
            self._output_logprobs.append(self._triple(entry.token_id, entry.logprob))
            self._output_top.append(self._top(entry))

    def _top(self, entry: TokenLogprob | None) -> list[Triple] | None:
        if entry is None:
            return None
        return [self._triple(token_id, logprob) for token_id, logprob in entry.top]

    def _triple(self, token_id: int, logprob: float | None) -> Triple:
        text = token_text(self._tokenizer, token_id) if self._with_text else None
        return None if logprob is None else finite(logprob), token_id, text


def _finish_reason(output: RequestOutput) -> StoppedBy | ReachedLength | Aborted | None:
    match output.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            return StoppedBy(matched=output.matched_stop)
        case FinishReason.LENGTH:
            return ReachedLength(length=output.completion_tokens)
    return Aborted(message=output.error or "The request was aborted.")


class _AnswerEvents:
    """Events with one answer each. If there are several sequences, answers have their index."""

    def __init__(self, answers: Sequence[_Answer], *, single: bool) -> None:
        self._answers = answers
        self._single = single

    def events(self, updates: list[Update]) -> bytes:
        written = []
        for index, output in updates:
            answer = self._answers[index].add(output)
            if not self._single:
                answer = GeneratedSoFar(answer.text, answer.output_ids, answer.meta_info, index)
            written.append(event(answer))
        return b"".join(written)

    def end(self) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.answer())
