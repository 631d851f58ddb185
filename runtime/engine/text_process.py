"""The engine process of a language model. `process` starts it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from ...kernels.collectives import CollectiveError
from ..cache.kv_events import KVEventsConfig
from ..config.engine import EngineConfig
from ..core.forward_context import call_on_each_layer
from ..core.generation import GenerateRequest
from ..core.messages import (
    AbortRequests,
    CacheFlushed,
    EngineChanged,
    EngineReady,
    FlushCache,
    StartProfile,
    StepOutput,
    StopProfile,
)
from ..distributed.processes import start_ranks
from ..distributed.ranks import RankError
from ..process.heartbeat import Heartbeat
from ..process.mailbox import Mailbox
from .build import Engine, build_engine
from .compiling import CompilingRequests
from .kv_publisher import KVPublisher
from .profiling import Profiler

_STARTUP_POLL_MS = 20  # How long to wait for a message before the next portion of the start-up.
_COMPILING_POLL_MS = 2  # The same while a request waits for its grammar.
_STATS_SECONDS = 0.1  # Largest age of the server's metrics of a busy engine.

logger = logging.getLogger(__name__)


class EngineProcess:
    """Receives messages, steps the engine core and sends its outputs."""

    def __init__(
        self, engine: Engine, mailbox: Mailbox, kv_publisher: KVPublisher | None = None
    ) -> None:
        self._core, self._runner, self._startup = engine
        self._kv_publisher = kv_publisher
        self._mailbox = mailbox
        self._compiling = CompilingRequests(self._core.grammars)
        self._sent_load, self._stats_due = (0, 0), 0.0
        self._heart = Heartbeat(mailbox.send)
        self._profiler = Profiler()
        call_on_each_layer(self._heart.beat_again)

    def ready(self) -> EngineReady:
        return EngineReady(info=self._runner.info())

    def run(self) -> None:
        """Serve until the mailbox closes. Raise `SystemExit` if the ranks cannot continue."""
        ranks, lost = self._runner.ranks, True
        try:
            self._loop()
            lost = False
        except Exception as error:
            if ranks.size == 1:
                raise
            trace = None if isinstance(error, RankError | CollectiveError) else error
            logger.error("the engine's %d ranks end: %s", ranks.size, error, exc_info=trace)
            raise SystemExit(1) from None
        finally:
            ranks.close(lost=lost)

    def _loop(self) -> None:
        while self._mailbox.is_open:
            if self._kv_publisher is not None:
                self._kv_publisher.publish()
            self._receive()
            self._heart.beat(
                "computing a step" if self._core.has_work else "loading graphs",
                may_build=self._startup.pending,
            )
            if self._core.has_work:
                self._mailbox.send(self._step())
                if self._profiler.is_running:
                    self._profiler.step()
            if self._startup.pending:
                self._startup.advance(busy=self._core.has_work)
                if not self._startup.pending:
                    self._mailbox.send(EngineChanged(info=self._runner.info()))
        self._compiling.close()
        self._startup.stop()
        self._runner.close()

    def _step(self) -> StepOutput:
        """Compute a step.

        Metrics take as long as the rest of the message. They are added if requests were added or
        removed, if no step follows, or if the last metrics are older than `_STATS_SECONDS`.
        """
        output, load, now = self._core.step(), self._core.load, time.monotonic()
        if load == self._sent_load and now < self._stats_due and self._core.has_work:
            return output
        self._sent_load, self._stats_due = load, now + _STATS_SECONDS
        return replace(output, stats=self._core.stats())

    def _receive(self) -> None:
        """Handle all messages that have arrived. Wait for one if there is nothing else to do."""
        if not self._core.has_work:
            self._runner.rest()
        patience = 0 if self._core.has_work else _STARTUP_POLL_MS
        if self._compiling.pending:
            patience = min(patience, _COMPILING_POLL_MS)
        elif not self._core.has_work and not self._startup.pending:
            self._heart.wait(self._mailbox.waits, self._runner.give_back_memory)
        for message in self._mailbox.received(patience):
            self._handle(message)
        for message in self._compiling.ready():
            self._core.add(message)

    def _handle(self, message: Any) -> None:
        match message:
            case GenerateRequest():
                if not self._compiling.takes(message):
                    self._core.add(message)
            case AbortRequests(rids=rids):
                self._compiling.drop(rids)
                self._core.abort(rids)
                self._send_stats()
            case FlushCache():
                freed = self._core.flush_cache()
                # Before the answer, because the caller may read the metrics at once.
                self._send_stats()
                self._mailbox.send(CacheFlushed(freed_tokens=freed))
            case StartProfile():
                self._mailbox.send(self._profiler.start(message))
            case StopProfile():
                self._mailbox.send(self._profiler.stop())

    def _send_stats(self) -> None:
        """Send metrics without a step. If no step follows, the old ones would stay."""
        self._mailbox.send(StepOutput(outputs=[], stats=self._core.stats()))


def build(settings: dict[str, Any], mailbox: Mailbox) -> EngineProcess:
    """Build the engine process of `settings`. See `process.Build`."""
    config = EngineConfig(**settings)
    kv_publisher = None
    if config.kv_events_config is not None:
        events_config = KVEventsConfig.parse(config.kv_events_config)
        kv_publisher = KVPublisher(events_config, config.replica) if events_config.is_on else None
    ranks = start_ranks(config)
    try:
        kv_events = None if kv_publisher is None else kv_publisher.events
        return EngineProcess(
            build_engine(config, ranks=ranks, kv_events=kv_events), mailbox, kv_publisher
        )
    except ValueError as error:
        ranks.close(reason=str(error))
        raise
