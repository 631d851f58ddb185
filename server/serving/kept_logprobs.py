"""Bounds the log-probabilities that answers hold in memory until they are written.

A body of a hundred bytes can ask for hundreds of megabytes of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.errors import ApiError, InvalidRequest, Unavailable
from ..core.limits import MAX_KEPT_LOGPROBS, MAX_LOGPROBS

_CODE = "too_many_logprobs"


class Holder(Protocol):
    """An answer that holds log-probabilities."""

    def fail(self, error: ApiError) -> None:
        """End the answer with `error` and free its log-probabilities."""
        ...


class KeptLogprobs:
    """Counts the log-probabilities of all answers of a server, alternatives included."""

    def __init__(self) -> None:
        self._held: dict[Holder, int] = {}
        self.total = 0

    def held(self, holder: Holder) -> int:
        return self._held.get(holder, 0)

    def add(self, holder: Holder, count: int) -> None:
        """Count `count` more log-probabilities of `holder`.

        An answer with more than `MAX_LOGPROBS` is ended. While all answers together hold more than
        `MAX_KEPT_LOGPROBS`, the largest is ended.
        """
        self._held[holder] = self.held(holder) + count
        self.total += count
        if self._held[holder] > MAX_LOGPROBS:
            message = f"logprobs: the answer has more than {MAX_LOGPROBS}, alternatives counted"
            self._end(
                holder,
                InvalidRequest(f"{message}; {_remedy('logprobs')}.", param="logprobs", code=_CODE),
            )
        while self.total > MAX_KEPT_LOGPROBS:
            message = (
                "The log-probabilities of all answers take more memory than there is for them; "
                "try again, or ask for fewer."
            )
            largest = max(self._held, key=self.held)
            self._end(largest, Unavailable(message, code=_CODE, headers={"Retry-After": "1"}))

    def drop(self, holder: Holder) -> None:
        """Count no log-probability of `holder` any more."""
        self.total -= self._held.pop(holder, 0)

    def _end(self, holder: Holder, error: ApiError) -> None:
        self.drop(holder)
        holder.fail(error)


def logprobs_in(output: RequestOutput) -> int:
    """Return how many log-probabilities `output` holds, of its tokens and of its prompt."""
    entries = (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
    return sum([1 + len(entry.top) for entry in entries if entry is not None])


def check_logprobs(requests: Sequence[RequestState], param: str) -> None:
    """Raise `InvalidRequest` if all tokens that may be generated have more than `MAX_LOGPROBS`.

    `param` is the parameter that asks for alternatives.
    """
    count = sum(
        [
            (1 + request.params.logprobs) * request.params.max_new_tokens
            for request in requests
            if request.params.logprobs is not None
        ]
    )
    if count > MAX_LOGPROBS:
        message = (
            f"{param}: {count} log-probabilities may be generated, samples counted, more than "
            f"{MAX_LOGPROBS}"
        )
        raise InvalidRequest(f"{message}; {_remedy(param)}.", param=param, code=_CODE)


def _remedy(param: str) -> str:
    return f"lower {param}, n or the number of tokens, or stream the answer"
