"""Checks that hold for every answer of every model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...bench.apis import Answer
from ...bench.target import Api
from .requests import Fate, SoakRequest


def problems(request: SoakRequest, answer: Answer) -> Iterator[str]:
    """Yield each fault of the answer to `request`. Its form was checked when it was read."""
    call = request.call
    if answer.retracted:
        yield "the stream took text back"
    for reason in answer.finish_reasons:
        if reason not in ("stop", "length") and not (
            reason == "abort" and request.fate is Fate.ABORT
        ):
            yield f"finish reason {reason}"
    if any(stop in text for stop in call.stop for text in answer.texts):
        yield "a stop string is in the text"
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        yield "no usage"
        return
    if isinstance(call.prompt, list) and answer.prompt_tokens != len(call.prompt):
        yield f"{answer.prompt_tokens} prompt tokens counted, {len(call.prompt)} sent"
    if not 0 <= answer.completion_tokens <= call.n * call.max_tokens:
        yield f"{answer.completion_tokens} tokens, more than {call.n} x {call.max_tokens}"
    if (
        all(reason == "length" for reason in answer.finish_reasons)
        and answer.completion_tokens != call.n * call.max_tokens
    ):
        yield (
            f"ended for length after {answer.completion_tokens} of {call.n} x {call.max_tokens} "
            "tokens"
        )
    yield from _logprob_problems(request, answer)


def _logprob_problems(request: SoakRequest, answer: Answer) -> Iterator[str]:
    entries = [logprob for sequence in answer.logprobs for logprob in sequence]
    if request.call.logprobs is None:
        if entries:
            yield "log-probabilities that nobody asked for"
        return
    if any(not math.isfinite(logprob) or logprob > 1e-4 for logprob in entries):
        yield "a log-probability that is not below 0"
    # A chat has none for tokens that are not part of its content, such as hidden special tokens.
    expected = answer.completion_tokens or 0
    if len(entries) > expected or (request.api is not Api.CHAT and len(entries) < expected):
        yield f"{len(entries)} log-probabilities of {answer.completion_tokens} tokens"
