"""How many replicas Ray Serve keeps: as many as the sequences that run and wait need."""

from __future__ import annotations

from typing import Any

RUNNING = "running_requests"
QUEUED = "queued_requests"


def queue_length(context: Any) -> tuple[float, dict[str, Any]]:
    """A policy of Ray's `AutoscalingConfig`: replicas for all sequences that the engines run and
    queue, and requests that wait for a replica, at `target_ongoing_requests` a replica.

    Ray's own counts HTTP requests: one of 64 samples is one to it.
    `context`: a `ray.serve.config.AutoscalingContext`.
    """
    metrics = context.aggregated_metrics or {}
    if not metrics.get(RUNNING):
        return context.target_num_replicas, {}
    sequences = sum(sum(metrics.get(name, {}).values()) for name in (RUNNING, QUEUED))
    waiting = context.total_queued_requests or 0
    return (sequences + waiting) / context.config.get_target_ongoing_requests(), {}
