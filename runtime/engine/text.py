"""The engine of a language model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.engine import EngineConfig
from ..config.kv_events import KVEventsConfig
from ..core.control_messages import (
    Pause,
    ReadWeights,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from ..core.forward_context import call_on_each_layer
from ..core.generation import GenerateRequest
from ..core.messages import (
    AdapterList,
    CacheFlushed,
    EngineChanged,
    EngineReady,
    EngineStats,
    FlushCache,
    FromEngine,
    ListAdapters,
    LoadAdapter,
    StartProfile,
    StepOutput,
    StopProfile,
    UnloadAdapter,
)
from ..distributed import processes
from ..distributed.ranks import Ranks
from ..graphs.graph_runner import GraphRunner
from ..tiers.build import make_tiers
from ..tiers.tiers import Tiers
from .build import Engine, build_engine
from .compiling import CompilingRequests
from .control import EngineControl
from .graph_startup import GraphStartup
from .kind import Work
from .loading import LoadingRequests
from .loading_adapters import LoadingAdapters
from .profiling import Profiler

_STARTUP_POLL_MS = 20  # How long to wait for a message before the next portion of the start-up.
_WAITING_POLL_MS = 2  # The same while a request waits for its grammar or its adapter.
_LOADING_POLL_MS = 1  # The same while a request waits for its prefix.
_SAVING_POLL_MS = 5  # How long an idle engine waits for a message before it copies more blocks.
_STATS_SECONDS = 0.1  # Largest age of the server's metrics of a busy engine.


class TextEngine:
    """Requests that wait for their adapter, prefix or grammar, the engine core, and its start-up
    between steps.

    `publish` publishes the changes of the prefix cache. It is called after each step.
    """

    def __init__(
        self,
        parts: Engine,
        publish: Callable[[], None] = lambda: None,
        tiers: Tiers | None = None,
    ) -> None:
        self._core, self._runner, self._startup = parts
        self.ranks: Ranks = self._runner.ranks
        self._publish = publish
        self._tiers, self._loading = tiers, LoadingRequests(tiers)
        self._compiling = CompilingRequests(self._core.grammars)
        self._adapters = LoadingAdapters(self._runner.adapters, self.ranks)
        self._sent_load, self._stats_due = (0, 0), 0.0
        self._control = EngineControl(
            self._core, self._runner, tiers, self._renew_graphs, self._loading.end
        )
        self._profiler = Profiler()

    def ready(self) -> EngineReady:
        return EngineReady(info=self._runner.info())

    def connect(self, beat: Callable[[], None], pause: Callable[[], None]) -> None:
        call_on_each_layer(beat)

    def work(self) -> Work | None:
        may_build = self._startup.pending
        if self._control.pending:
            return Work("changing weights", may_build=True, patience=_LOADING_POLL_MS)
        if self._control.stopped:
            pending = self._adapters.pending
            return Work("loading an adapter", may_build, _WAITING_POLL_MS) if pending else None
        if self._core.has_work:
            return Work("computing a step", may_build)
        if self._loading.pending:
            return Work("loading a prefix", may_build, _LOADING_POLL_MS)
        if self._compiling.pending:
            return Work("compiling a grammar", may_build, _WAITING_POLL_MS)
        if self._adapters.pending:
            return Work("loading an adapter", may_build, _WAITING_POLL_MS)
        if may_build:
            return Work("loading graphs", may_build, _STARTUP_POLL_MS)
        if self._tiers is not None and self._tiers.unsaved:
            return Work("saving prefixes", may_build, _SAVING_POLL_MS)
        return None

    def handle(self, message: Any) -> Iterator[FromEngine]:
        match message:
            case GenerateRequest():
                if not self._adapters.takes(message):
                    self._load(message)
            case LoadAdapter():
                self._adapters.load(message)
            case UnloadAdapter():
                self._adapters.unload(message)
            case ListAdapters():
                known = self._runner.adapters
                yield AdapterList(adapters=[] if known is None else known.infos())
            case (
                Pause() | Resume() | Sleep() | WakeUp() | UpdateWeights() | ReadWeights() as control
            ):
                self._control.take(control)
            case FlushCache():
                freed = self._core.flush_cache()
                # Before the answer, because the caller may read the metrics at once.
                yield self.report()
                yield CacheFlushed(freed_tokens=freed)
            case StartProfile():
                yield self._profiler.start(message)
            case StopProfile():
                yield self._profiler.stop()

    def abort(self, rids: list[str]) -> None:
        self._adapters.drop(rids)
        self._loading.drop(rids)
        self._compiling.drop(rids)
        self._core.abort(rids)

    def step(self) -> Iterator[FromEngine]:
        yield from self._control.advance()
        yield from self._adapters.advance(self._loading.adapters | self._compiling.adapters)
        if self._control.stopped:
            return
        for message in self._adapters.ready():
            self._load(message)
        if refused := self._adapters.refused():
            yield StepOutput(outputs=refused)
        for message in self._loading.ready():
            self._compile(message)
        for message in self._compiling.ready():
            self._core.add(message)
        if self._core.has_work:
            yield self._step()
            if self._profiler.is_running:
                self._profiler.step()
        if not self._core.has_work:
            self._runner.rest()
            if self._tiers is not None and self._tiers.unsaved and not self._loading.pending:
                self._tiers.save_some()
        if self._startup.pending:
            self._startup.advance(busy=self._core.has_work)
            if not self._startup.pending:
                yield EngineChanged(info=self._runner.info())
        self._publish()

    def _load(self, message: GenerateRequest) -> None:
        if not self._loading.takes(message):
            self._compile(message)

    def _renew_graphs(self) -> None:
        """Load the pieces again, because they hold packed copies of the weights."""
        runner = self._runner
        if runner.platform.packed_linear() is not None:
            self._startup.stop()
            runner.layout.forget()
            runner.graphs = GraphRunner(
                runner.model,
                runner.platform,
                runner.config,
                runner.attention,
                runner.seen_lengths,
                runner.ranks,
                None if runner.adapters is None else runner.adapters.slots.step,
            )
            self._startup = GraphStartup(runner)

    def _compile(self, message: GenerateRequest) -> None:
        if not self._compiling.takes(message):
            self._core.add(message)

    def _step(self) -> StepOutput:
        """Compute a step.

        Metrics take as long as the rest of the message. They are added if requests were added or
        removed, if no step follows, or if the last metrics are older than `_STATS_SECONDS`.
        """
        began, computed = time.monotonic(), self._core.computed_tokens
        output, load, now = self._core.step(), self._core.load, time.monotonic()
        self._loading.observe(self._core.computed_tokens - computed, now - began)
        if load == self._sent_load and now < self._stats_due and self._core.has_work:
            return output
        self._sent_load, self._stats_due = load, now + _STATS_SECONDS
        return replace(output, stats=self._stats())

    def _stats(self) -> EngineStats:
        stats = self._core.stats()
        if self._tiers is None:
            return stats
        return replace(
            stats,
            loaded_tokens_total=self._loading.loaded_tokens,
            lost_blocks_total=self._tiers.lost,
            dropped_blocks_total=self._tiers.dropped,
        )

    def report(self) -> StepOutput:
        return StepOutput(outputs=[], stats=self._stats())

    def give_back_memory(self) -> None:
        self._runner.give_back_memory()

    def close(self) -> None:
        self._control.close()
        self._loading.close()
        self._compiling.close()
        if self._tiers is not None:
            self._tiers.close()
        self._adapters.close()
        self._startup.stop()
        self._runner.close()

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "add": self._core.add,
            "abort": self._core.abort,
            "flush_cache": self._core.flush_cache,
            "step": self._core.step,
            "advance": self._startup.follow,
            "add_adapter": self._adapters.repeat,
            "remove_adapter": self._adapters.repeat_removal,
            "give_back_memory": self._runner.give_back_memory,
        }

    @property
    def expects_step(self) -> bool:
        return self._core.has_work


def start_ranks(settings: dict[str, Any]) -> Ranks:
    return processes.start_ranks(EngineConfig(**settings))


def build(settings: dict[str, Any], ranks: Ranks) -> TextEngine:
    config, leads = EngineConfig(**settings), ranks.rank == 0
    events, publish = None, lambda: None
    if leads and config.kv_events_config is not None:
        events_config = KVEventsConfig.parse(config.kv_events_config)
        if events_config.is_on:
            # Needs ZeroMQ, which other ranks may lack.
            from .kv_publisher import KVPublisher

            publisher = KVPublisher(events_config, config.replica)
            events, publish = publisher.events, publisher.publish
    parts = build_engine(config, progress=leads, ranks=ranks, kv_events=events)
    if events is not None and parts.runner.adapters is not None:
        events.name_of_adapter = parts.runner.adapters.name_of
    tiers = make_tiers(config, parts.runner, parts.core.cache) if leads else None
    if events is not None and tiers is not None:
        tiers.report_to(events)
    return TextEngine(parts, publish, tiers)
