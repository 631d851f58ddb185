"""Measures one sequence for the metrics, while its outputs arrive."""

from __future__ import annotations

import time

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from .metrics import Metrics


class SequenceClock:
    """The times of one sequence, by `time.monotonic()`.

    `first_token` and `last_token` are None before the first token.
    """

    def __init__(self, metrics: Metrics, request: RequestState) -> None:
        self._metrics, self._request = metrics, request
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._begun = self._ended = False
        self._reason: FinishReason | None = None

    @property
    def started(self) -> float | None:
        """When the computation began, limited to the time from `arrival` to `first_token`."""
        started = self._request.started
        if started is None:
            return None
        return max(self.arrival, min(started, self.first_token or started))

    @property
    def finish_reason(self) -> str:
        return self._reason or FinishReason.ABORT

    def output(self, output: RequestOutput) -> None:
        metrics = self._metrics
        if not self._begun:
            self._begun = True
            metrics.prompt_tokens.value += output.prompt_tokens
            metrics.cached_tokens.value += output.cached_tokens
        if count := len(output.token_ids):
            now = time.monotonic()
            metrics.generation_tokens.value += count
            if self.last_token is None:
                self.first_token = self.last_token = now
                metrics.time_to_first_token.observe(now - self.arrival)
                if (started := self.started) is not None:
                    metrics.queue_time.observe(started - self.arrival)
                    metrics.prefill_time.observe(now - started)
                count -= 1
            if count:
                metrics.inter_token_latency.observe((now - self.last_token) / count, count)
            self.last_token = now
        self._reason = output.finish_reason
        if self._reason is not None:
            self.end()

    def fail(self) -> None:
        self._reason = FinishReason.ERROR

    def end(self) -> None:
        """End the sequence. Without a finish reason the client has left. A second call does
        nothing.
        """
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.requests.value += 1
        metrics.finished[self.finish_reason] += 1
        if self._reason is None or self._reason is FinishReason.ABORT:
            metrics.aborted.value += 1
        elif self._reason is not FinishReason.ERROR:
            metrics.end_to_end.observe(time.monotonic() - self.arrival)
            metrics.prompt_lengths.observe(len(self._request.prompt_ids))
            metrics.output_lengths.observe(len(self._request.output_ids))
            if self.first_token is not None and self.last_token is not None:
                metrics.decode_time.observe(self.last_token - self.first_token)
