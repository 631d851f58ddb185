"""Builds the engine's requests from an OpenAI request, and selects the best samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...runtime.core.images import ImageInput
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.errors import InvalidRequest
from ..core.limits import check_text
from ..serving.kept_logprobs import check_logprobs
from ..serving.request_builder import WireNames, build_requests, check_prompt_logprobs
from ..serving.state import Serving
from .requests import ChatCompletionRequest, CompletionRequest


def generation_requests(
    serving: Serving,
    body: CompletionRequest | ChatCompletionRequest,
    request_id: str,
    prompts: Sequence[list[int]],
    grammar: str | None,
    visible: frozenset[int] = frozenset(),
    prediction: Sequence[int] = (),
    images: Sequence[ImageInput] = (),
    keep: Sequence[tuple[int, float]] = (),
    **values: Any,
) -> list[RequestState]:
    """Return `body.samples` sequences for each prompt, prompt by prompt. Raise `InvalidRequest`.

    `visible` are special tokens that are part of the text, `prediction` the tokens of
    `body.prediction`, `images` and `keep` those of the prompt. `values` are more
    parameters of `SamplingParams`.
    """
    if isinstance(body, ChatCompletionRequest):
        prompt, top, echo = "messages", "top_logprobs", False
        logprobs = body.top_logprobs if body.logprobs else None
    else:
        prompt, top, echo = "prompt", "logprobs", body.echo
        logprobs = body.logprobs
    max_tokens = _most_tokens(body, echo=echo)
    of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    names = WireNames(
        prompt,
        {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "prompt_logprobs": of_prompt,
            "logprobs": top,
        },
    )
    # `echo` and `prompt_logprobs` share one computation with the larger number of alternatives.
    asked_of_prompt = [
        count for count in (body.prompt_logprobs, logprobs if echo else None) if count is not None
    ]
    samples, arrival = body.samples, time.monotonic()
    adapter = (
        serving.adapter_of(body.model)
        if body.lora_path is None
        else serving.adapter_for(body.model, body.lora_path)
    )
    requests: list[RequestState] = []
    for ids in prompts:
        requests += build_requests(
            serving,
            body,
            ids,
            [f"{request_id}-{len(requests) + sample}" for sample in range(samples)],
            names=names,
            max_tokens=max_tokens,
            include_stop=body.include_stop_str_in_output,
            visible=visible,
            prediction=prediction,
            images=images,
            keep=[*keep, (len(ids), body.kept_seconds)] if body.kept_seconds else keep,
            affinity=body.prompt_cache_key or "",
            adapter=adapter,
            priority=body.priority,
            arrival_time=arrival,
            belongs_to=frozenset({request_id}),
            **values,
            min_new_tokens=body.min_tokens,
            extra_args=body.vllm_xargs or None,
            seed=body.seed,
            grammar=grammar,
            # The best samples are chosen by their log-probabilities.
            logprobs=0 if logprobs is None and samples > body.n else logprobs,
            prompt_logprobs=max(asked_of_prompt, default=None),
        )
    check_prompt_logprobs(requests, of_prompt, streamed=body.stream)
    if max_tokens is not None and not body.stream:
        check_logprobs(requests, top)
    return requests


def _most_tokens(body: CompletionRequest | ChatCompletionRequest, *, echo: bool) -> int | None:
    """Return the largest number of new tokens. Raise `InvalidRequest`."""
    most, name = body.max_completion_tokens, "max_completion_tokens"
    if most is None:
        most, name = body.max_tokens, "max_tokens"
    if most == 0 and not echo:
        raise InvalidRequest(
            f"{name} must be at least 1; 0 is for echo.", param=name, code="invalid_value"
        )
    return most


async def prediction_ids(
    serving: Serving, body: CompletionRequest | ChatCompletionRequest
) -> list[int]:
    """Return the tokens of the text that the client expects, or none."""
    if body.prediction is None:
        return []
    text, name = "".join(body.prediction.content), "prediction"
    # The tokens are kept instead. The answer may take minutes.
    body.prediction.content.clear()
    check_text(len(text), name)
    ids = await serving.encode(text, add_special_tokens=False, param=name)
    serving.limits.check_length(len(ids), name)
    return ids


def best(outputs: Sequence[RequestOutput], samples: int, n: int) -> list[RequestOutput]:
    """Return the `n` outputs per prompt with the highest mean log-probability, best first.

    If n = samples, return all outputs in their order.
    """
    if samples == n:
        return list(outputs)
    chosen: list[RequestOutput] = []
    for first in range(0, len(outputs), samples):
        chosen += sorted(outputs[first : first + samples], key=_mean_logprob, reverse=True)[:n]
    return chosen


def _mean_logprob(output: RequestOutput) -> float:
    entries = output.logprobs or []
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")
