"""Tells Ray Serve how many replicas the running and waiting sequences need."""

from __future__ import annotations

from typing import Any

RUNNING = "running_requests"
QUEUED = "queued_requests"


def queue_length(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the wanted number of replicas. This is a policy of Ray's `AutoscalingConfig`.

    It counts the sequences that engines run and queue, and requests that wait for a replica, and
    divides by `target_ongoing_requests`. Ray's own policy counts HTTP requests, so a request of 64
    samples counts once. `context` is a `ray.serve.config.AutoscalingContext`.
    """
    metrics = context.aggregated_metrics or {}
    if not metrics.get(RUNNING):
        return context.target_num_replicas, {}
    sequences = sum(sum(metrics.get(name, {}).values()) for name in (RUNNING, QUEUED))
    waiting = context.total_queued_requests or 0
    return (sequences + waiting) / context.config.get_target_ongoing_requests(), {}
