"""Chooses which inputs of which requests are computed together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from ..core.pooling_messages import NO_ADAPTER, PoolOutput, PoolRequest, PoolStats, PoolStep
from .model import PoolingModel, PoolInput

logger = logging.getLogger(__name__)


class _Job:
    """A request and its results. Inputs are sorted by length, longest first, so that those of a
    batch are similar.
    """

    def __init__(self, request: PoolRequest, size: int) -> None:
        self.rid = request.rid
        ids = np.frombuffer(request.token_ids, "<i4").astype(np.int32, copy=False)
        parts = np.split(ids, np.cumsum(request.lengths)[:-1])
        firsts = request.firsts or request.lengths
        adapters = request.adapters or [NO_ADAPTER] * len(parts)
        self.inputs = [PoolInput(*each) for each in zip(parts, firsts, adapters, strict=True)]
        self.order = sorted(range(len(parts)), key=lambda index: -request.lengths[index])
        self.begun = self.done = 0
        self.vectors = np.empty((len(parts), size), np.float32)

    @property
    def next_length(self) -> int:
        return len(self.inputs[self.order[self.begun]].token_ids)

    def take(self) -> int:
        """Return the number of the next input."""
        self.begun += 1
        return self.order[self.begun - 1]


class PoolingScheduler:
    """Fills batches from all requests in turn, one input of each.

    A batch ends before the input that would exceed its budget of tokens.
    """

    def __init__(self, model: PoolingModel) -> None:
        self._model = model
        self._jobs: dict[str, _Job] = {}
        self._turns: deque[_Job] = deque()
        self._totals = {"steps_total": 0, "inputs_total": 0, "tokens_total": 0}

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    def add(self, request: PoolRequest) -> None:
        job = _Job(request, self._model.size)
        self._jobs[job.rid] = job
        self._turns.append(job)

    def abort(self, rids: Iterable[str]) -> None:
        """End these requests. Unknown ids are ignored."""
        for rid in rids:
            if (job := self._jobs.pop(rid, None)) is not None:
                self._turns.remove(job)

    def stats(self) -> PoolStats:
        most = self._model.config.max_running_requests or len(self._jobs)
        running = min(most, len(self._jobs))
        return PoolStats(
            running_requests=running,
            queued_requests=len(self._jobs) - running,
            **self._totals,
        )

    def step(self) -> PoolStep:
        """Compute a batch and return the requests that ended."""
        batch = self._plan()
        outputs = self._compute(batch)
        self._totals["steps_total"] += 1
        for job, number in batch:
            self._totals["inputs_total"] += 1
            self._totals["tokens_total"] += len(job.inputs[number].token_ids)
        return PoolStep(outputs=outputs, stats=self.stats())

    def _plan(self) -> list[tuple[_Job, int]]:
        """Return the inputs of a batch, at least one. Requests without further inputs leave the
        queue.
        """
        batch: list[tuple[_Job, int]] = []
        left = self._model.token_budget
        while self._turns and (not batch or self._turns[0].next_length <= left):
            job = self._turns.popleft()
            left -= job.next_length
            batch.append((job, job.take()))
            if job.begun < len(job.order):
                self._turns.append(job)
        return batch

    def _compute(self, batch: list[tuple[_Job, int]]) -> list[PoolOutput]:
        """Compute inputs. A failure ends only the request of the input."""
        outputs = []
        try:
            vectors = self._model.run([job.inputs[number] for job, number in batch])
        except Exception as error:
            if len(batch) > 1:
                logger.warning("a batch failed, and is computed an input at a time: %s", error)
                return [output for each in batch for output in self._compute([each])]
            logger.exception("request %s ends", batch[0][0].rid)
            return self._fail(batch[0][0], f"its computation failed: {error}")
        for (job, number), vector in zip(batch, vectors, strict=True):
            if job.rid not in self._jobs:
                continue
            if not np.isfinite(vector).all():
                outputs += self._fail(
                    job, "the model's result is not finite; serve it with --dtype float32"
                )
                continue
            job.vectors[number] = vector
            job.done += 1
            if job.done == len(job.order):
                del self._jobs[job.rid]
                data = job.vectors.astype("<f4", copy=False).tobytes()
                outputs.append(PoolOutput(rid=job.rid, vectors=data))
        return outputs

    def _fail(self, job: _Job, reason: str) -> list[PoolOutput]:
        if self._jobs.pop(job.rid, None) is None:
            return []
        if job in self._turns:
            self._turns.remove(job)
        return [PoolOutput(rid=job.rid, error=reason)]
