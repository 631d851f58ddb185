"""Prometheus metrics. Their names are those of SGLang with the prefix `piecework:`."""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...runtime.core.engine_info import GraphInfo
from ...runtime.core.generation import FinishReason
from ..engine.interface import Engine, TextEngine
from ..engine.state import EngineState
from .gateway_metrics import gateway_metrics

PREFIX = "piecework:"
# Histogram bounds in seconds.
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
# Histogram bounds in tokens, up to the longest contexts.
_TOKENS = tuple(float(2**power) for power in range(18))

# Fields of `EngineStats` without their suffix `_total`.
_TOTALS = {
    "preemptions": "Sequences that had to give their KV cache back and were recomputed.",
    "overlapped_steps": "Batches that were planned while the one before ran.",
    "discarded_tokens": "Tokens computed before it was known that their sequence had ended.",
    "piecewise_steps": "Batches that were run in compiled pieces.",
    "graph_replays": "Batches that were run by replaying a captured size.",
    "prefill_steps": "Batches that were not decodes alone.",
    "prefill_step_tokens": "Tokens of these batches.",
    "prefill_replays": "Those of these batches that replayed a captured size.",
    "prefill_replayed_tokens": "Tokens of these replays, without padding.",
    "drafts": "Sequences in batches that verified tokens that were proposed for them.",
    "draft_tokens": "Tokens that were proposed and verified.",
    "accepted_tokens": "Proposed tokens that were right.",
    "loaded_tokens": "Prompt tokens that were loaded from a tier below the KV cache.",
    "lost_blocks": "Evicted blocks that a tier below the KV cache could not keep.",
    "dropped_blocks": "Evicted blocks that were not saved because saving had taken enough time.",
    "encoded_images": "Images that the vision encoder computed.",
    "image_hits": "Images of new requests whose result of the encoder was kept.",
    "padded_tokens": "Tokens that were added to batches to reach a captured size.",
}
# Name, documentation and field of `RankInfo`.
_RANK_GAUGES = (
    ("weight_memory_bytes", "Memory of the weights that a rank holds.", "weight_bytes"),
    ("kv_memory_bytes", "Memory of the KV cache that a rank holds.", "kv_bytes"),
)
# Name, documentation and function of a replica.
_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    ("replica_up", "1 while a replica serves.", lambda each: each.state is EngineState.READY),
    (
        "replica_running_reqs",
        "Sequences that a replica computes.",
        lambda each: each.stats.running_requests,
    ),
    ("replica_queue_reqs", "Sequences that wait there.", lambda each: each.stats.queued_requests),
    (
        "replica_token_usage",
        "Share of its KV cache, or recurrent states, that running sequences hold.",
        lambda each: each.stats.cache_share,
    ),
    (
        "replica_cache_hit_rate",
        "Share of its prompt tokens that was found in its prefix cache.",
        lambda each: each.stats.cached_tokens_total / (each.stats.prompt_tokens_total or 1),
    ),
)


def _created_now() -> float | None:
    """Return the time as a series' creation time, or None if these are disabled.

    prometheus_client's variable PROMETHEUS_DISABLE_CREATED_SERIES disables them.
    """
    off = os.environ.get("PROMETHEUS_DISABLE_CREATED_SERIES", "").lower() in ("true", "1", "t")
    return None if off else time.time()


class Total:
    """A counter without the lock of prometheus_client's counters.

    All counting is done in the event loop, some of it for each token.
    """

    def __init__(self, name: str, documentation: str) -> None:
        self.name, self.documentation = PREFIX + name, documentation
        self.value = 0
        self._created = _created_now()

    def family(self, model_name: str) -> Metric:
        family = CounterMetricFamily(self.name, self.documentation, labels=["model_name"])
        family.add_metric([model_name], self.value, created=self._created)
        return family


class Latency:
    """A histogram of seconds or tokens. `observe` can add several equal values at once."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name, self.documentation = PREFIX + name, documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = _created_now()

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def family(self, model_name: str) -> Metric:
        family = HistogramMetricFamily(self.name, self.documentation, labels=["model_name"])
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric([model_name], list(buckets), self._sum)
        if self._created is not None:
            family.add_sample(f"{self.name}_created", {"model_name": model_name}, self._created)
        return family


Figure = tuple[str, str, float]  # Name, documentation and value.


class MetricRegistry(Collector):
    """The metrics of every server: its own counters, and figures read from its engine on request.

    It has a registry of its own, so that several applications may run in one process. `unit` names
    what the engine computes, such as "Sequences" or "Images".
    """

    unit = "Sequences"

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self.model_name = model_name
        self.requests = Total("num_requests", f"{self.unit} that ended, in whatever way.")
        self.aborted = Total(
            "num_aborted_requests", f"{self.unit} whose client left, or that were aborted."
        )
        self.end_to_end = Latency(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _END_TO_END
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._errors = Counter(
            PREFIX + "num_errors",
            "Answers that were errors.",
            ["model_name", "type"],
            registry=self._registry,
        )

    def count_error(self, kind: str) -> None:
        self._errors.labels(self.model_name, kind).inc()

    def errors(self) -> dict[str, int]:
        """Return the number of errors by type."""
        samples = (sample for family in self._errors.collect() for sample in family.samples)
        return {
            sample.labels["type"]: int(sample.value)
            for sample in samples
            if sample.name.endswith("_total")
        }

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def families(self) -> Iterable[Metric]:
        """Return all metrics, to be merged with those of others."""
        return self._registry.collect()

    def collect(self) -> Iterator[Metric]:
        for series in vars(self).values():
            if isinstance(series, Total | Latency):
                yield series.family(self.model_name)
        for kind, figures in (
            (GaugeMetricFamily, self.gauges()),
            (CounterMetricFamily, self.totals()),
        ):
            for name, documentation, value in figures:
                yield self._family(kind, name, documentation, {(): value})
        several = self._engine.replicas
        engines = {f"engine-{n}": each.engine_pid for n, each in enumerate(several)} or {
            "engine": self._engine.engine_pid
        }
        resident: dict[tuple[str, ...], float] = {}
        for name, pid in {"server": os.getpid(), **engines}.items():
            # The process may end meanwhile.
            with contextlib.suppress(psutil.Error):
                if pid is not None:
                    resident[(name,)] = psutil.Process(pid).memory_info().rss
        yield self._family(
            GaugeMetricFamily,
            "resident_memory_bytes",
            "Memory that a process of the server has in use.",
            resident,
            "process",
        )

    def gauges(self) -> list[Figure]:
        """Return the current gauges of the engine."""
        engine, stats = self._engine, self._engine.stats
        heard = "Time since the engine's last sign of life."
        return [
            ("engine_up", "1 while the engine serves.", engine.state is EngineState.READY),
            ("num_running_reqs", f"{self.unit} that are being computed.", stats.running_requests),
            ("num_queue_reqs", f"{self.unit} that wait.", stats.queued_requests),
            ("engine_silence_seconds", heard, engine.silence),
        ]

    def totals(self) -> list[Figure]:
        """Return the engine's totals since its start."""
        engine, restarts = self._engine, "How often the engine process was started again."
        return [
            ("num_engine_restarts", restarts, engine.restarts),
            ("num_watchdog_restarts", "How often because it hung.", engine.hangs),
            ("num_steps", "Batches that the engine has run.", engine.stats.steps_total),
        ]

    def _family(
        self,
        kind: Any,
        name: str,
        documentation: str,
        values: dict[tuple[str, ...], float],
        *labels: str,
    ) -> Metric:
        """Return a family. `values` are by the values of `labels`, without the model's name."""
        family = kind(PREFIX + name, documentation, labels=["model_name", *labels])
        for own, value in sorted(values.items()):
            family.add_metric([self.model_name, *own], value)
        return family  # type: ignore[no-any-return]


class Metrics(MetricRegistry):
    """The metrics of a server of a language model."""

    def __init__(self, engine: TextEngine, model_name: str) -> None:
        super().__init__(engine, model_name)
        self._tokens = engine
        self.prompt_tokens = Total("prompt_tokens", "Prompt tokens of the sequences that began.")
        self.cached_tokens = Total(
            "cached_tokens", "Prompt tokens that were found in the prefix cache."
        )
        self.generation_tokens = Total("generation_tokens", "Generated tokens.")
        self.time_to_first_token = Latency(
            "time_to_first_token_seconds",
            "From a sequence's arrival to its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self.inter_token_latency = Latency(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _INTER_TOKEN
        )
        self.queue_time = Latency(
            "queue_time_seconds",
            "From a sequence's arrival until it begins to be computed.",
            _TIME_TO_FIRST_TOKEN,
        )
        self.prefill_time = Latency(
            "prefill_time_seconds",
            "From when a sequence begins to be computed to its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self.decode_time = Latency(
            "decode_time_seconds", "From a sequence's first token to its last.", _END_TO_END
        )
        self.prompt_lengths = Latency(
            "prompt_tokens_histogram", "Prompt tokens of a sequence.", _TOKENS
        )
        self.output_lengths = Latency(
            "generation_tokens_histogram", "Generated tokens of a sequence.", _TOKENS
        )
        self.finished = dict.fromkeys(map(str, FinishReason), 0)

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        reasons = self._tokens.stats.graph_fallbacks_total
        yield self._family(
            CounterMetricFamily,
            "num_graph_fallbacks",
            "Batches that ran without a graph where one was hoped for.",
            {(reason,): count for reason, count in reasons.items()},
            "reason",
        )
        graphs = GraphInfo() if self._tokens.info is None else self._tokens.info.graphs
        yield self._family(
            GaugeMetricFamily,
            "pass_matches",
            "How often each pass matched in the forward that runs in pieces.",
            {(name,): count for name, count in graphs.passes.items()},
            "pass",
        )
        yield self._family(
            GaugeMetricFamily,
            "pass_off",
            "1 for each pass that does not run, with the reason.",
            dict.fromkeys(graphs.passes_off.items(), 1.0),
            "pass",
            "reason",
        )
        yield self._family(
            CounterMetricFamily,
            "request_success",
            "Sequences that ended, by how, under vLLM's name.",
            {(reason,): count for reason, count in self.finished.items()},
            "finished_reason",
        )
        yield from gateway_metrics(self._tokens, self.model_name)
        ranks = [] if self._tokens.info is None else self._tokens.info.ranks
        for name, documentation, field in _RANK_GAUGES:
            values: dict[tuple[str, ...], float] = {
                (str(rank),): getattr(info, field) for rank, info in enumerate(ranks)
            }
            yield self._family(GaugeMetricFamily, name, documentation, values, "tp_rank")
        for name, documentation, value_of in _REPLICA_GAUGES:
            replicas: dict[tuple[str, ...], float] = {
                (str(number),): value_of(each) for number, each in enumerate(self._tokens.replicas)
            }
            yield self._family(GaugeMetricFamily, name, documentation, replicas, "replica")

    def gauges(self) -> list[Figure]:
        stats, info = self._tokens.stats, self._tokens.info
        graphs = GraphInfo() if info is None else info.graphs
        used, size = stats.kv_tokens_used, stats.kv_tokens_total
        hit = stats.cached_tokens_total / (stats.prompt_tokens_total or 1)
        cached = stats.kv_tokens_cached
        return [
            *super().gauges(),
            ("num_used_tokens", "Tokens of the KV cache that running sequences hold.", used),
            ("num_cached_tokens", "Tokens of the KV cache that hold prefixes for reuse.", cached),
            ("encoder_cache_bytes", "Memory of kept results of the encoder.", stats.encoder_bytes),
            (
                "num_touched_tokens",
                "Tokens of the KV cache whose memory was used at least once since the start.",
                stats.kv_tokens_touched,
            ),
            ("max_total_num_tokens", "Size of the KV cache in tokens.", size),
            (
                "token_usage",
                "Share of the KV cache, or recurrent states, that running sequences hold.",
                stats.cache_share,
            ),
            (
                "cache_hit_rate",
                "Share of all prompt tokens that was found in the prefix cache.",
                hit,
            ),
            (
                "prefill_replay_share",
                "Share of the batches with prompts that replayed a captured size.",
                stats.prefill_replay_share,
            ),
            (
                "prefill_replay_token_share",
                "Share of the tokens of these batches that were in replays.",
                stats.prefill_replay_token_share,
            ),
            ("num_graphs", "Graphs that are captured.", graphs.num_graphs),
            ("graph_memory_bytes", "Memory of all graphs.", graphs.graph_bytes),
            ("graph_capture_seconds", "Time that all captures took.", graphs.capture_seconds),
        ]

    def totals(self) -> list[Figure]:
        stats, seconds = self._tokens.stats, "Time between batches in which images were encoded."
        figures = [("encoder_seconds", seconds, stats.encoder_seconds_total)]
        return (
            super().totals()
            + figures
            + [
                (f"num_{name}", documentation, getattr(stats, f"{name}_total"))
                for name, documentation in _TOTALS.items()
            ]
        )
