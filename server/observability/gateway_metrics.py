"""Metrics under vLLM's names: those by which Kubernetes' Inference Gateway chooses a server, and
those of speculative decoding.

The gateway's model server protocol takes their names from vLLM:

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-mode
l-server-protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine.interface import TextEngine

PREFIX = "vllm:"


def gateway_metrics(engine: TextEngine, model_name: str) -> Iterator[Metric]:
    """Yield the waiting and running sequences, the used share of the KV cache, its pages, and the
    counts of proposed tokens.
    """
    stats, info = engine.stats, engine.info
    figures = (
        ("num_requests_waiting", "Sequences that wait.", stats.queued_requests),
        ("num_requests_running", "Sequences that are being computed.", stats.running_requests),
        (
            "kv_cache_usage_perc",
            "Share of the KV cache that running sequences hold; 1 is all of it.",
            stats.cache_share,
        ),
    )
    for name, documentation, value in figures:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
    pages = GaugeMetricFamily(
        PREFIX + "cache_config_info",
        "Tokens in a page of the KV cache, and how many pages it has.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    if info is not None:
        count = info.kv_tokens // info.page_size
        pages.add_metric([model_name, str(info.page_size), str(count)], 1)
    yield pages
    counts = (
        ("spec_decode_num_drafts", "Sequences in batches with proposals.", stats.drafts_total),
        ("spec_decode_num_draft_tokens", "Proposed tokens.", stats.draft_tokens_total),
        ("spec_decode_num_accepted_tokens", "Right ones of them.", stats.accepted_tokens_total),
    )
    for name, documentation, value in counts:
        counter = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
    by_position = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "Right proposed tokens by their position after the known tokens.",
        labels=["model_name", "position"],
    )
    for position, count in stats.accepted_by_position_total.items():
        by_position.add_metric([model_name, position], count)
    yield by_position
