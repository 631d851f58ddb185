"""The GPU suite's ops: those between matrix products, with every kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_engines import Scale, milliseconds, no_grad

_TOKENS = (1, 16, 256, 4096)
# Calls that are timed together, in one graph if the device has graphs, because launching a call
# takes longer than running it.
_CALLS = 50


@no_grad
def op_times(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure one call of each op.

    Return `rows`, with microseconds by version and the `bytes` that the op reads and writes, and
    `errors` of those that did not run.
    """
    platform = detect(device)
    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for tokens in (number for number in _TOKENS if number <= max(scale.prefill_sizes)):
        for what, (op, moved, arguments) in _work(scale, tokens, platform).items():
            times: dict[str, float] = {}
            for name, version in platform.op_versions().items():
                call = partial(getattr(version, op, _has_not), *arguments)
                try:
                    if call() is None:
                        continue
                    times[name] = microseconds(call, platform, scale)
                except Exception as error:
                    errors[f"{what}, {tokens} tokens, {name}"] = " ".join(
                        f"{type(error).__name__}: {error}".split()
                    )[:200]
            rows.append({"op": what, "tokens": tokens, "bytes": moved, "microseconds": times})
    return {"rows": rows, "errors": errors}


def _has_not(*arguments: Any) -> None:
    """Stand in for an op that a version lacks."""


def _work(
    scale: Scale, tokens: int, platform: Platform
) -> dict[str, tuple[str, int, tuple[Any, ...]]]:
    """Return (op, bytes that it moves, arguments) of every op of a layer and of norms of heads."""
    model, dtype = scale.model, getattr(torch, scale.dtype)
    hidden, inner, size = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=platform.device()).to(dtype)

    x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    beside, eps = random(tokens, heads + 2 * kv_heads, size), 1e-5
    cos, sin = random(tokens, 1, size), random(tokens, 1, size)
    turned = heads + kv_heads
    elements: dict[str, tuple[str, int, tuple[Any, ...]]] = {
        "norm": ("rms_norm", 2 * x.numel(), (x, weight, eps)),
        "add and norm": ("add_rms_norm", 4 * x.numel(), (x, residual, weight, eps)),
        "norm of heads": (
            "rms_norm",
            2 * tokens * heads * size,
            (beside[:, :heads], random(size), eps),
        ),
        "gated activation": ("silu_and_mul", 3 * tokens * inner, (random(tokens, 2 * inner),)),
        "rotation": (
            "rotary_embedding",
            2 * tokens * (turned + 1) * size,
            (beside[:, :turned], cos, sin),
        ),
    }
    return {
        what: (op, number * dtype.itemsize, arguments)
        for what, (op, number, arguments) in elements.items()
    }


def microseconds(call: Callable[[], Any], platform: Platform, scale: Scale) -> float:
    """Return the microseconds of one call among many."""

    def calls() -> list[torch.Tensor]:
        """Drop each result, so that each call gets the same memory."""
        for _ in range(_CALLS):
            call()
        return []

    if not platform.graphs_are_real:
        return milliseconds(calls, platform, scale)["median"] / _CALLS * 1e3
    graph, pool = platform.graph(), platform.graph_pool()
    graph.capture(calls, pool, platform.graph_stream())
    return milliseconds(graph.replay, platform, scale)["median"] / _CALLS * 1e3
