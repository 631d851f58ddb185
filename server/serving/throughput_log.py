"""A line in the log every few seconds while a server of a language model has traffic.

INFO piecework.throughput: throughput model=qwen running=3 waiting=0 prompt_tokens_per_second=...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from ...runtime.process.logs import with_fields
from .state import Serving

logger = logging.getLogger("piecework.throughput")

# Tokens of prompts, cached tokens of prompts, and tokens of answers.
_Totals = tuple[int, int, int]


class ThroughputLog:
    """Logs what each server of `servings` did in the last `seconds`.

    A server that did nothing and has no request is left out.
    """

    def __init__(self, servings: Callable[[], Iterable[Serving]], seconds: float) -> None:
        self._servings = servings
        self._seconds = seconds
        self._before: dict[int, _Totals] = {}
        self._at = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                self.log()
            except Exception:
                logger.exception("the throughput cannot be logged")

    def log(self) -> None:
        """Log the time since the last call."""
        now = time.monotonic()
        seconds, self._at = max(now - self._at, 1e-9), now
        totals = {}
        for serving in self._servings():
            metrics, stats = serving.metrics, serving.engine.stats
            new = (
                metrics.prompt_tokens.value,
                metrics.cached_tokens.value,
                metrics.generation_tokens.value,
            )
            totals[id(serving)] = new
            old = self._before.get(id(serving), (0, 0, 0))
            prompts, cached, answers = (now - then for now, then in zip(new, old, strict=True))
            if not (prompts or answers or stats.running_requests or stats.queued_requests):
                continue
            fields = {
                "model": serving.model_name,
                "running": stats.running_requests,
                "waiting": stats.queued_requests,
                "prompt_tokens_per_second": round(prompts / seconds, 1),
                "generation_tokens_per_second": round(answers / seconds, 1),
                "cache_usage": round(stats.cache_share, 3),
                "cache_hit_rate": round(cached / prompts, 3) if prompts else None,
            }
            logger.info("throughput", extra=with_fields(fields))
        self._before = totals
