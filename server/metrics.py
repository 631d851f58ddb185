"""Prometheus metrics, under the names that SGLang uses for the same things, with the prefix
`piecework:`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..runtime.engine.messages import FinishReason, GraphInfo
from ..runtime.tokenizer.output_processor import RequestOutput
from .engine.client import Engine
from .engine.state import AnyEngine, EngineState

PREFIX = "piecework:"
_TIME_TO_FIRST_TOKEN = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100,
    200, 400,
)  # fmt: skip
_INTER_TOKEN = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15,
    0.2, 0.4, 0.8, 1, 2, 4, 8,
)  # fmt: skip
_END_TO_END = (
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200,
    1800,
)  # fmt: skip
"""Histogram bounds in seconds."""


class MetricRegistry:
    """What every server counts; its own registry, so that several applications may live in one
    process.

    Subclasses call a unit of work by its name: `unit` is "Sequences" or "Images".
    """

    unit = "Sequences"

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.requests = self._counter("num_requests", f"{self.unit} that ended, in whatever way.")
        self.aborted = self._counter(
            "num_aborted_requests", f"{self.unit} whose client left, or that were aborted."
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _END_TO_END
        )
        self._errors = Counter(
            PREFIX + "num_errors",
            "Answers that were errors.",
            ["model_name", "type"],
            registry=self.registry,
        )

    def count_error(self, kind: str) -> None:
        self._errors.labels(self.model_name, kind).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(PREFIX + name, documentation, ["model_name"], registry=self.registry).labels(
            self.model_name
        )

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, documentation, ["model_name"], registry=self.registry, buckets=buckets
        ).labels(self.model_name)


class Metrics(MetricRegistry):
    """What a server of a language model counts."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        super().__init__(model_name)
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of the sequences that began."
        )
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that were found in the prefix cache."
        )
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a sequence's arrival to its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _INTER_TOKEN
        )
        self.registry.register(_TokenCollector(engine, model_name))


class SequenceClock:
    """Times and counts one sequence as its outputs arrive."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last_token: float | None = None
        self._begun = self._ended = False
        self._reason: FinishReason | None = None

    def output(self, output: RequestOutput) -> None:
        metrics = self._metrics
        if not self._begun:
            self._begun = True
            metrics.prompt_tokens.inc(output.prompt_tokens)
            metrics.cached_tokens.inc(output.cached_tokens)
        if count := len(output.token_ids):
            now = time.monotonic()
            metrics.generation_tokens.inc(count)
            if self._last_token is None:
                metrics.time_to_first_token.observe(now - self._arrival)
                self._last_token = now
                count -= 1
            for _ in range(count):
                metrics.inter_token_latency.observe((now - self._last_token) / count)
            self._last_token = now
        self._reason = output.finish_reason
        if self._reason is not None:
            self.end()

    def fail(self) -> None:
        self._reason = FinishReason.ERROR

    def end(self) -> None:
        """The sequence is over; without a finish reason its client has left. Ending twice does
        nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._metrics.requests.inc()
        if self._reason is None or self._reason is FinishReason.ABORT:
            self._metrics.aborted.inc()
        elif self._reason is not FinishReason.ERROR:
            self._metrics.end_to_end.observe(time.monotonic() - self._arrival)


class EngineCollector(Collector):
    """Reads the engine's own figures when the metrics are asked for: those that every engine
    has.
    """

    def __init__(self, engine: AnyEngine, model_name: str, unit: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._unit = unit

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._gauge(
            "engine_up", "1 while the engine serves.", self._engine.state is EngineState.READY
        )
        yield self._gauge(
            "num_running_reqs", f"{self._unit} that are being computed.", stats.running_requests
        )
        yield self._gauge("num_queue_reqs", f"{self._unit} that wait.", stats.queued_requests)
        yield self._gauge(
            "engine_silence_seconds",
            "Time since the engine's last sign of life.",
            self._engine.silence,
        )
        yield self._counter(
            "num_engine_restarts",
            "How often the engine process was started again.",
            self._engine.restarts,
        )
        yield self._counter(
            "num_watchdog_restarts", "How often because it hung.", self._engine.hangs
        )
        yield self._counter("num_steps", "Batches that the engine has run.", stats.steps_total)

    def _counters(self, name: str, documentation: str, label: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, documentation, labels=["model_name", label])

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class _TokenCollector(EngineCollector):
    """The figures of a language model's engine."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        super().__init__(engine, model_name, "Sequences")
        self._tokens = engine

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        stats = self._tokens.stats
        yield self._gauge(
            "num_used_tokens",
            "Tokens of the KV cache that running sequences hold.",
            stats.kv_tokens_used,
        )
        yield self._gauge(
            "num_cached_tokens",
            "Tokens of the KV cache that hold prefixes for reuse.",
            stats.kv_tokens_cached,
        )
        yield self._gauge(
            "max_total_num_tokens", "Size of the KV cache in tokens.", stats.kv_tokens_total
        )
        usage = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
        yield self._gauge(
            "token_usage", "Share of the KV cache that running sequences hold.", usage
        )
        hits = (
            stats.cached_tokens_total / stats.prompt_tokens_total
            if stats.prompt_tokens_total
            else 0.0
        )
        yield self._gauge(
            "cache_hit_rate", "Share of all prompt tokens that was found in the prefix cache.", hits
        )
        yield self._counter(
            "num_preemptions",
            "Sequences that had to give their KV cache back and were recomputed.",
            stats.preemptions_total,
        )
        yield self._counter(
            "num_overlapped_steps",
            "Batches that were planned while the one before ran.",
            stats.overlapped_steps_total,
        )
        yield self._counter(
            "num_discarded_tokens",
            "Tokens computed before it was known that their sequence had ended.",
            stats.discarded_tokens_total,
        )
        yield self._counter(
            "num_piecewise_steps",
            "Batches that were run in compiled pieces.",
            stats.piecewise_steps_total,
        )
        yield self._counter(
            "num_graph_replays",
            "Batches that were run by replaying a captured size.",
            stats.graph_replays_total,
        )
        yield self._counter(
            "num_padded_tokens",
            "Tokens that were added to batches to reach a captured size.",
            stats.padded_tokens_total,
        )

        fallbacks = self._counters(
            "num_graph_fallbacks",
            "Batches that ran without a graph where one was hoped for.",
            "reason",
        )
        for reason, count in sorted(stats.graph_fallbacks_total.items()):
            fallbacks.add_metric([self._model_name, reason], count)
        yield fallbacks
        graphs = self._tokens.info.graphs if self._tokens.info is not None else GraphInfo()
        yield self._gauge("num_graphs", "Graphs that are captured.", graphs.num_graphs)
        yield self._gauge("graph_memory_bytes", "Memory of all graphs.", graphs.graph_bytes)
        yield self._gauge(
            "graph_capture_seconds", "Time that all captures took.", graphs.capture_seconds
        )
