"""From an OpenAI request to sequences, and from sequences to choices and usage."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ...runtime.tokenizer.output_processor import GenerationOutput, GenerationRequest, TextOptions
from ..errors import InvalidRequest
from ..limits import check_prompt_logprobs, sampling_params
from ..state import Serving
from .protocol import ChatCompletionRequest, CompletionRequest

Body = CompletionRequest | ChatCompletionRequest


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def head(serving: Serving, request_id: str, kind: str) -> dict[str, Any]:
    """The members that a response and every chunk of a stream begin with."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": serving.model_name,
        "system_fingerprint": serving.fingerprint,
    }


def generation_requests(
    serving: Serving, body: Body, request_id: str, prompts: Sequence[list[int]]
) -> list[GenerationRequest]:
    """`body.samples` sequences for each prompt, prompt by prompt. Raises `InvalidRequest`."""
    chat = isinstance(body, ChatCompletionRequest)
    param = "messages" if chat else "prompt"
    limits = serving.limits
    limits.check_token_ids(body.stop_token_ids, "stop_token_ids")
    limits.check_token_ids(body.logit_bias, "logit_bias")
    asked, length = _asked_tokens(body)
    default = None if chat else CompletionRequest.model_fields["max_tokens"].default
    text = TextOptions(
        stop=body.stop,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
    )
    arrival = time.monotonic()
    requests: list[GenerationRequest] = []
    for ids in prompts:
        limits.check_prompt(ids, param)
        max_tokens = limits.completion_tokens(len(ids), asked, default, (param, length))
        params = sampling_params(_wire_names(body), **_sampling_values(body, max_tokens))
        for sample in range(body.samples):
            # Samples of one prompt differ by their seeds alone.
            seeded = (
                params
                if body.seed is None
                else dataclasses.replace(params, seed=body.seed + sample)
            )
            rid = f"{request_id}-{len(requests)}"
            requests.append(
                GenerationRequest(
                    rid=rid,
                    prompt_ids=ids,
                    params=seeded,
                    text=text,
                    priority=body.priority,
                    arrival_time=arrival,
                    belongs_to=frozenset({request_id}),
                )
            )
    check_prompt_logprobs(requests, "logprobs")
    return requests


def _asked_tokens(body: Body) -> tuple[int | None, str]:
    """How many tokens the client asked for, None where it left that to the server, and by which
    parameter.
    """
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = (
            body.max_tokens if "max_tokens" in body.model_fields_set else None,
            "max_tokens",
        )
    if asked == 0 and not (isinstance(body, CompletionRequest) and body.echo):
        raise InvalidRequest(
            f"{name} must be at least 1; 0 is for echo.", param=name, code="invalid_value"
        )
    return asked, name


def _wire_names(body: Body) -> dict[str, str]:
    logprobs = "top_logprobs" if isinstance(body, ChatCompletionRequest) else "logprobs"
    return {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "prompt_logprobs": "logprobs",
        "logprobs": logprobs,
    }


def _sampling_values(body: Body, max_tokens: int) -> dict[str, Any]:
    """What `SamplingParams` is made from."""
    if isinstance(body, ChatCompletionRequest):
        logprobs, echoed = body.top_logprobs if body.logprobs else None, None
    else:
        logprobs, echoed = body.logprobs, body.logprobs if body.echo else None
    return {
        "max_new_tokens": max_tokens,
        "min_new_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k or -1,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": body.seed,
        "stop_token_ids": sorted(set(body.stop_token_ids)),
        "ignore_eos": body.ignore_eos,
        "logit_bias": body.logit_bias,
        # The best of several samples are chosen by their log-probabilities.
        "logprobs": 0 if logprobs is None and body.samples > body.n else logprobs,
        "prompt_logprobs": echoed,
    }


def best(outputs: Sequence[GenerationOutput], samples: int, n: int) -> list[GenerationOutput]:
    """Of each prompt's `samples` outputs the `n` of the highest mean log-probability, best first;
    all in order where n = samples.
    """
    if samples == n:
        return list(outputs)
    chosen: list[GenerationOutput] = []
    for first in range(0, len(outputs), samples):
        chosen += sorted(outputs[first : first + samples], key=_mean_logprob, reverse=True)[:n]
    return chosen


def _mean_logprob(output: GenerationOutput) -> float:
    entries = output.logprobs or []
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")


class Usage:
    """Counts the tokens of one request: each prompt once, and every token that was sampled."""

    def __init__(self, requests: Sequence[GenerationRequest], samples: int) -> None:
        self._samples = samples
        self._prompt_tokens = sum(len(request.prompt_ids) for request in requests[::samples])
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add_prompt(self, index: int, output: GenerationOutput) -> None:
        """Take what an output of sequence `index` tells of its prompt."""
        if index % self._samples == 0:
            self._cached_tokens[index] = output.cached_tokens

    def add_tokens(self, output: GenerationOutput) -> None:
        self._completion_tokens += len(output.token_ids)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }


def total_usage(
    requests: Sequence[GenerationRequest], samples: int, outputs: Sequence[GenerationOutput]
) -> dict[str, Any]:
    """The usage of a whole answer."""
    usage = Usage(requests, samples)
    for index, output in enumerate(outputs):
        usage.add_prompt(index, output)
        usage.add_tokens(output)
    return usage.as_dict()
