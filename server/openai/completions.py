"""`POST /v1/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Literal, cast

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.answers import BODY_ERRORS, Answer, ErrorAnswer, answers
from ..http.body import JsonRoute
from ..serving.collector import Collector
from ..serving.sse import EventStream
from ..serving.state import Serving, ServingDep, json_response
from ..serving.structured import grammar_of
from .chunks import ChunkWriter, GenerationAnswer, UsageAnswer, head, usage_of
from .generation import best, generation_requests, prediction_ids
from .infill import with_suffix
from .logprobs import CompletionLogprobs, CompletionLogprobsAnswer, PromptLogprobs, prompt_logprobs
from .requests import CompletionRequest

router = APIRouter(route_class=JsonRoute)
CompletionReason = Literal["stop", "length", "abort"]


class CompletionChunkChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None = None
    finish_reason: CompletionReason | None = None


class CompletionChoice(CompletionChunkChoice):
    """`prompt_logprobs` is set if the request asks for it."""

    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(GenerationAnswer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(GenerationAnswer, kw_only=True):
    """`usage` is set if `stream_options` asks for it."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChunkChoice]


@router.post(
    "/v1/completions",
    responses=answers(Completion, stream=CompletionChunk | ErrorAnswer, errors=BODY_ERRORS),
)
async def create_completion(body: CompletionRequest, serving: ServingDep) -> Response:
    """Continue one or more prompts."""
    serving.check_model(body.model)
    serving.check_room(len(body.prompt) * body.samples, "prompt")
    prompts = await serving.prompt_ids(
        body.prompt, "prompt", add_special_tokens=body.add_special_tokens
    )
    if body.suffix:
        body, prompts = await with_suffix(serving, body, prompts)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    grammar = await grammar_of(serving, body)
    requests = generation_requests(
        serving,
        body,
        request_id,
        prompts,
        grammar,
        prediction=await prediction_ids(serving, body),
    )
    start = head(serving, request_id, requests[0])
    choices = [_Choice(serving, body, prompts, index) for index in range(len(prompts) * body.n)]
    if body.stream:
        first = CompletionChunk(**start, choices=[])
        chunks = _CompletionChunks(serving, first, requests, body, choices)
        return EventStream(Collector(serving, requests), chunks, serving)

    def write(outputs: list[RequestOutput]) -> Response:
        chosen = best(outputs, body.samples, body.n)
        written = [choice.write(output) for choice, output in zip(choices, chosen, strict=True)]
        tokens = sum([output.completion_tokens for output in outputs])
        usage = usage_of(requests, body.samples, tokens)
        return json_response(Completion(**start, choices=written, usage=usage))

    with Collector(serving, requests) as collector:
        return await collector.written(write)


class _Choice:
    """Writes one choice, whole or piece by piece.

    With `echo` the prompt comes before the first piece.
    """

    def __init__(
        self, serving: Serving, body: CompletionRequest, prompts: Sequence[list[int]], index: int
    ) -> None:
        self._tokenizer = tokenizer = serving.engine.tokenizer
        prompt = body.prompt[index // body.n]
        self._index = index
        self._body = body
        self._echoed = ""
        if body.echo:
            self._echoed = (
                prompt
                if isinstance(prompt, str)
                else tokenizer.decode(prompt, skip_special_tokens=False)
            )
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                tokenizer,
                prompts[index // body.n],
                self._echoed,
                count=body.logprobs,
                skip_special_tokens=body.skip_special_tokens,
            )

    def write(self, output: RequestOutput) -> CompletionChoice:
        """Return the choice for new output."""
        echoed, self._echoed = self._echoed, ""
        of_prompt = output.prompt_logprobs
        return CompletionChoice(
            self._index,
            echoed + output.text,
            None
            if self._logprobs is None
            else self._logprobs.write(
                output.token_ids, output.logprobs or (), of_prompt if self._body.echo else None
            ),
            cast("CompletionReason | None", output.finish_reason),
            prompt_logprobs(self._tokenizer, of_prompt, self._body.prompt_logprobs),
        )


class _CompletionChunks(ChunkWriter):
    """Chunks of a streamed completion.

    The last chunk of a choice has its last text and its finish reason.
    """

    def __init__(
        self,
        serving: Serving,
        start: CompletionChunk,
        requests: Sequence[RequestState],
        body: CompletionRequest,
        choices: Sequence[_Choice],
    ) -> None:
        super().__init__(serving, start, requests, body)
        self._choices = choices
        self._wants_tokens = body.logprobs is not None

    def text_choice(self, index: int, text: str) -> Answer:
        return CompletionChunkChoice(index, text)

    def choices(self, index: int, output: RequestOutput) -> Sequence[Answer]:
        choice = self._choices[index].write(output)
        has_news = (
            choice.text
            or choice.finish_reason is not None
            or (self._wants_tokens and output.token_ids)
        )
        return [choice] if has_news else []
