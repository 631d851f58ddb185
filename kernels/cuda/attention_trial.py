"""Try an attention backend on two small steps, before a model depends on it."""

from __future__ import annotations

import torch

from ..attention import AttentionBackend, AttentionMetadata, KVLayout
from ..paged_attention import TorchAttention
from .libraries import one_line

_PAGE_SIZE = 16
_TABLE = [[1, 2], [3, 0]]
_SEQ_LENS = [20, 9]
_STEPS = [[5, 1], [1, 1]]  # New tokens of each request: a mixed step, then only decodes.
_TOLERANCE = 2e-2


def failure(backend: AttentionBackend, layout: KVLayout, device: torch.device) -> str | None:
    """Return why a backend cannot compute such a layer here, or None if its results equal plain
    torch's. Building kernels may take minutes.
    """
    try:
        distance = max(_distance(backend, layout, query_lens, device) for query_lens in _STEPS)
    except Exception as error:
        return f"its kernels do not work here ({one_line(error)})"
    return (
        None
        if distance <= _TOLERANCE
        else f"its kernels compute other numbers here, off by a share of {distance:.1g}"
    )


@torch.inference_mode()
def _distance(
    backend: AttentionBackend, layout: KVLayout, query_lens: list[int], device: torch.device
) -> float:
    """Return the relative distance of its result from plain torch's."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, layout.dtype)

    slots = [
        row[position // _PAGE_SIZE] * _PAGE_SIZE + position % _PAGE_SIZE
        for row, new, length in zip(_TABLE, query_lens, _SEQ_LENS, strict=True)
        for position in range(length - new, length)
    ]
    metadata = AttentionMetadata(
        query_lens=query_lens,
        seq_lens=_SEQ_LENS,
        block_table=torch.tensor(_TABLE, device=device),
        slot_mapping=torch.tensor(slots, device=device),
    )
    q = random(len(slots), layout.num_heads, layout.key_size)
    k, v = (random(len(slots), layout.num_kv_heads, layout.key_size) for _ in range(2))
    caches = [random(4, _PAGE_SIZE, layout.num_kv_heads, layout.key_size) for _ in range(2)]
    if layout.latent:
        v = k[..., : layout.value_size]
    if layout.cache_dtype is not None:
        caches = [cache.to(layout.cache_dtype) for cache in caches]
    results = []
    for tried in (TorchAttention(), backend):
        out = torch.full_like(q[..., : layout.value_size], float("nan"))
        k_cache, v_cache = (cache.clone() for cache in caches)
        if layout.latent:
            v_cache = k_cache[..., : layout.value_size]
        plan = tried.plan(metadata, _PAGE_SIZE)
        tried.run(q, k, v, out, k_cache, v_cache, plan, layout)
        results.append(out.float())
    expected, actual = results
    return float((actual - expected).norm() / expected.norm())
