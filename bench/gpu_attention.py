"""The GPU suite's attention: one layer with every backend, and with torch's varlen attention where
it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_checks import made_up_step
from .gpu_engines import Scale, milliseconds

# `torch.nn.attention.varlen` needs contiguous keys and values, so it runs only prompts without a
# cached prefix.
_VARLEN = "torch varlen"


def attention(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure one layer of the model's shapes, including storing keys and values.

    Return `rows`, milliseconds by step and backend, and `errors` of those that did not run.
    """
    platform, model, dtype = detect(device), scale.model, getattr(torch, scale.dtype)
    layout = KVLayout.of_heads(
        model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"], dtype
    )
    able = [
        backend
        for backend in platform.attention_backends
        if platform.attention_obstacle(backend, layout) is None
    ]
    rows: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    for step, lens in _steps(scale).items():
        metadata, num_pages = made_up_step(lens, platform, np.random.default_rng(1))
        tensors = _tensors(layout, sum(metadata.query_lens), num_pages, platform)
        rows[step] = {}
        ragged = platform.device_type == "cuda" and all(past == 0 and new > 1 for new, past in lens)
        for name in [*able, *[_VARLEN] * ragged]:
            try:
                work = _work(name, tensors, layout, metadata, platform)
                rows[step][name] = milliseconds(work, platform, scale)["median"]
            except Exception as error:
                errors[f"{step}, {name}"] = " ".join(f"{type(error).__name__}: {error}".split())[
                    :200
                ]
    return {"rows": rows, "errors": errors}


def _steps(scale: Scale) -> dict[str, list[tuple[int, int]]]:
    """Return the steps to measure: (new tokens, cached tokens) of each request."""
    longest, several = max(scale.prefill_sizes), max(scale.batch_sizes)
    return {
        f"prompt of {longest}": [(longest, 0)],
        "16 prompts of an eighth": [(max(2, longest // 8), 0)] * 16,
        f"prompt of {longest // 8} over {longest}": [(longest // 8, longest)],
        f"decode of {scale.context}": [(1, scale.context - 1)],
        f"{several} decodes of {scale.context}": [(1, scale.context - 1)] * several,
    }


def _tensors(
    layout: KVLayout, tokens: int, num_pages: int, platform: Platform
) -> tuple[torch.Tensor, ...]:
    """Return random q, k, v, out and the two caches."""
    kv = (layout.num_kv_heads, layout.key_size)
    q, k, v = (
        torch.randn(tokens, *shape, device=platform.device()).to(layout.dtype)
        for shape in ((layout.num_heads, layout.key_size), kv, kv)
    )
    caches = (
        torch.randn(num_pages, platform.default_page_size, *kv, device=platform.device()).to(
            layout.dtype
        )
        for _ in range(2)
    )
    return q, k, v, torch.empty_like(q), *caches


def _work(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    layout: KVLayout,
    metadata: AttentionMetadata,
    platform: Platform,
) -> Callable[[], Any]:
    """Return a call of one layer's attention. The step is already planned, as for all layers after
    the first.
    """
    q, k, v = tensors[:3]
    if name != _VARLEN:
        backend = platform.attention_backend(name)
        plan = backend.plan(metadata, platform.default_page_size)
        out, k_cache, v_cache = tensors[3:]
        return lambda: backend.run(q, k, v, out, k_cache, v_cache, plan, layout)
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *accumulate(metadata.query_lens)], dtype=torch.int32, device=q.device)
    longest = max(metadata.query_lens)
    # Torch 2.11 always shares keys among heads; 2.13 has a parameter for this.
    shared: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    )
    return partial(
        varlen_attn, q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **shared
    )
