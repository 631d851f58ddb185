"""`POST /v1/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.answers import BODY_ERRORS, answers
from ..http.body import JsonRoute
from ..serving.collector import Collector
from ..serving.sse import EventStream
from ..serving.state import Serving, ServingDep, json_response
from ..serving.structured import grammar_of
from .answers import Completion, CompletionChunk
from .chunks import ChunkWriter, head, usage_of
from .generation import best, generation_requests
from .infill import with_suffix
from .logprobs import CompletionLogprobs, prompt_logprobs
from .requests import CompletionRequest

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions", responses=answers(Completion, stream=CompletionChunk, errors=BODY_ERRORS)
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
    requests = generation_requests(serving, body, request_id, prompts, grammar)
    start = head(serving, request_id, "text_completion")
    choices = [_Choice(serving, body, prompts, index) for index in range(len(prompts) * body.n)]
    if body.stream:
        chunks = _CompletionChunks(serving, start, requests, body, choices)
        return EventStream(Collector(serving, requests), chunks, serving.metrics)

    def write(outputs: list[RequestOutput]) -> Response:
        chosen = best(outputs, body.samples, body.n)
        written = [choice.write(output) for choice, output in zip(choices, chosen, strict=True)]
        usage = usage_of(requests, body.samples, sum([one.completion_tokens for one in outputs]))
        return json_response({**start, "choices": written, "usage": usage})

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

    def write(self, output: RequestOutput) -> dict[str, Any]:
        """Return the choice for new output."""
        echoed, self._echoed = self._echoed, ""
        of_prompt = output.prompt_logprobs
        choice = {
            "index": self._index,
            "text": echoed + output.text,
            "logprobs": None
            if self._logprobs is None
            else self._logprobs.write(
                output.token_ids, output.logprobs or (), of_prompt if self._body.echo else None
            ),
            "finish_reason": output.finish_reason,
        }
        logprobs = prompt_logprobs(self._tokenizer, of_prompt, self._body.prompt_logprobs)
        return choice if logprobs is None else {**choice, "prompt_logprobs": logprobs}


class _CompletionChunks(ChunkWriter):
    """Chunks of a streamed completion.

    The last chunk of a choice has its last text and its finish reason.
    """

    def __init__(
        self,
        serving: Serving,
        start: dict[str, Any],
        requests: Sequence[RequestState],
        body: CompletionRequest,
        choices: Sequence[_Choice],
    ) -> None:
        super().__init__(serving, start, requests, body)
        self._choices = choices
        self._wants_tokens = body.logprobs is not None

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choice = self._choices[index].write(output)
        has_news = (
            choice["text"]
            or choice["finish_reason"] is not None
            or (self._wants_tokens and output.token_ids)
        )
        return [choice] if has_news else []
