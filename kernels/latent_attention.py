"""Attention over latent vectors (MLA, arXiv:2405.04434), in the cheaper of two forms.

Absorbed: a head's query is multiplied by the weight that makes keys, and the result of attention by
the weight that makes values. All heads then read the latent vectors as stored. This form needs few
products at the start and many per pair of query and vector.

Expanded: every latent vector is first multiplied into each head's key and value, which are shorter.
Requests with many new tokens are computed in this form.

T tokens, H heads, R numbers of a latent vector, followed by P numbers of a rotated key that all
heads share, N numbers of a head's query that are not rotated, V of its value, S tokens of a
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F

from . import cache_format
from .attention import AttentionBackend, AttentionMetadata, KVLayout
from .staging import to_device

# Numbers of expanded keys and values in memory at once. Further heads are computed after that.
_EXPANDED_NUMBERS = 2**26


class LatentLayer(NamedTuple):
    """The arguments of one layer.

    Attributes:
        q: [T, H, N + P].
        k: [T, 1, R + P].
        weight: [H * (N + V), R]: for each head the rows that make keys, then those that make
            values.
        out: [T, H, V].
    """

    q: torch.Tensor
    k: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    cache: torch.Tensor
    layout: KVLayout

    @property
    def unturned(self) -> int:
        """N: the numbers of a head's query that are not rotated."""
        return self.q.shape[2] + self.layout.value_size - self.layout.key_size


@runtime_checkable
class KeepsApart(Protocol):
    """A backend that stores latent vectors in an order other than [pages, S, 1, R + P].

    The caches have that shape. `keeps_apart` tells for which layers the order differs.
    """

    def keeps_apart(self, layout: KVLayout, page_size: int) -> bool: ...

    def store_latent(
        self, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout
    ) -> None: ...

    def read_latent(
        self, cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout
    ) -> torch.Tensor:
        """Return the pages as [pages, S, 1, R + P]."""
        ...


class _Expanded(NamedTuple):
    """An expanded request. Its new tokens are the rows [start, stop) of the step.

    `plan` is the backend's plan for this request alone, in pages of its own.
    """

    start: int
    stop: int
    seq_len: int
    pages: torch.Tensor
    slots: torch.Tensor
    plan: Any


class LatentPlan(NamedTuple):
    """The expanded requests of a step, and the rows and the plan of the other requests."""

    expanded: list[_Expanded]
    rows: torch.Tensor | None
    plan: Any


def expands(new: int, length: int, heads_numbers: int, layout: KVLayout) -> bool:
    """Return whether `new` of `length` tokens need fewer products in the expanded form.

    Both forms compute about the same number of products per second (`python -m
    piecework.lab.latent_attention`). `heads_numbers` is N + V.
    """
    pairs = new * (length - new / 2)
    latent, turned = layout.value_size, layout.key_size - layout.value_size
    made = latent * heads_numbers
    return pairs * (2 * latent + turned) + new * made > (
        pairs * (heads_numbers + 2 * turned) + length * made
    )


def are_long(
    metadata: AttentionMetadata, layer: LatentLayer, backend: AttentionBackend
) -> list[bool]:
    """Return for each request whether to expand it. If the heads are longer than `backend`
    supports, no request is expanded.
    """
    if _expanded_width(layer, backend) is None:
        return [False] * len(metadata.query_lens)
    heads_numbers = layer.unturned + layer.out.shape[2]
    return [
        expands(new, length, heads_numbers, layer.layout)
        for new, length in zip(metadata.query_lens, metadata.seq_lens, strict=True)
    ]


def _expanded_width(layer: LatentLayer, backend: AttentionBackend) -> int | None:
    """Return the size of expanded keys and values, or None if the backend supports none that fits.

    Keys and values are padded to one size, because more kernels support that. A backend with
    kernels for some sizes only lists these in `head_sizes`.
    """
    width = max(layer.q.shape[2], layer.out.shape[2])
    sizes: Sequence[int] | None = getattr(backend, "head_sizes", None)
    if sizes is None:
        return width
    return min((size for size in sizes if size >= width), default=None)


def plan_latent(
    backend: AttentionBackend,
    metadata: AttentionMetadata,
    page_size: int,
    is_long: Sequence[bool],
) -> LatentPlan | None:
    """Return the plan of a step in which the requests marked by `is_long` are expanded, or None if
    no request is.
    """
    if not any(is_long):
        return None
    device, starts = metadata.slot_mapping.device, [0, *accumulate(metadata.query_lens)]
    expanded = []
    for index in (index for index, long in enumerate(is_long) if long):
        new, length = metadata.query_lens[index], metadata.seq_lens[index]
        pages = -(-length // page_size)
        alone = AttentionMetadata(
            query_lens=[new],
            seq_lens=[length],
            block_table=torch.arange(
                pages, dtype=metadata.block_table.dtype, device=device
            ).unsqueeze(0),
            slot_mapping=torch.arange(
                length - new, length, dtype=metadata.slot_mapping.dtype, device=device
            ),
        )
        expanded.append(
            _Expanded(
                starts[index],
                starts[index + 1],
                length,
                metadata.block_table[index, :pages].long(),
                metadata.slot_mapping[starts[index] : starts[index + 1]].long(),
                backend.plan(alone, page_size),
            )
        )
    others = [index for index, long in enumerate(is_long) if not long]
    if not others:
        return LatentPlan(expanded, None, None)
    rows, rest = part_of_step(metadata, others)
    return LatentPlan(expanded, rows, backend.plan(rest, page_size))


def part_of_step(
    metadata: AttentionMetadata, requests: Sequence[int]
) -> tuple[torch.Tensor, AttentionMetadata]:
    """Return the rows of some requests of a step, and the metadata of a step with these requests
    alone.
    """
    starts = [0, *accumulate(metadata.query_lens)]
    places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in requests])
    rows, members = to_device([places, np.array(requests)], metadata.slot_mapping.device)
    return rows, replace(
        metadata,
        query_lens=[metadata.query_lens[index] for index in requests],
        seq_lens=[metadata.seq_lens[index] for index in requests],
        block_table=metadata.block_table[members],
        slot_mapping=metadata.slot_mapping[rows],
    )


def run_latent(
    backend: AttentionBackend, layer: LatentLayer, plan: Any, latent_plan: LatentPlan | None
) -> None:
    """Store k, and write causal attention into out. `plan` is the backend's plan of the step."""
    if latent_plan is None:
        layer.out.copy_(_absorbed(backend, layer, plan))
        return
    if latent_plan.rows is not None:
        rows = latent_plan.rows
        part = layer._replace(q=layer.q[rows], k=layer.k[rows], out=layer.out[: len(rows)])
        layer.out.index_copy_(0, rows, _absorbed(backend, part, latent_plan.plan))
    for request in latent_plan.expanded:
        _expand(backend, layer, request)


def _absorbed(backend: AttentionBackend, layer: LatentLayer, plan: Any) -> torch.Tensor:
    """Return attention in the absorbed form, [T, H, V]."""
    layout, k = layer.layout, layer.k
    q = absorbed_queries(layer)
    attended = q.new_empty(*q.shape[:2], layout.value_size)
    backend.run(
        q, k, k[..., : layout.value_size], attended,
        layer.cache, layer.cache[..., : layout.value_size], plan, layout,
    )  # fmt: skip
    return heads_values(layer, attended)


def absorbed_queries(layer: LatentLayer) -> torch.Tensor:
    """Return queries [T, H, R + P] for the latent vectors as stored."""
    q, turned = layer.q.tensor_split([layer.unturned], dim=-1)
    of_keys = layer.weight.view(layer.q.shape[1], -1, layer.layout.value_size)[:, : layer.unturned]
    absorbed = torch.bmm(q.transpose(0, 1), of_keys).transpose(0, 1)
    return torch.cat((absorbed, turned), dim=-1)


def heads_values(layer: LatentLayer, attended: torch.Tensor) -> torch.Tensor:
    """Turn weighted sums of latent vectors [T, H, R] into values [T, H, V]."""
    of_values = layer.weight.view(layer.q.shape[1], -1, layer.layout.value_size)[
        :, layer.unturned :
    ]
    return torch.bmm(attended.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1)


def keeper(backend: AttentionBackend, layer: LatentLayer) -> KeepsApart | None:
    """Return the backend if it stores this layer's vectors in its own order, otherwise None."""
    if isinstance(backend, KeepsApart) and backend.keeps_apart(layer.layout, layer.cache.shape[1]):
        return backend
    return None


def store(backend: AttentionBackend, layer: LatentLayer, rows: slice, slots: torch.Tensor) -> None:
    """Store the latent vectors of some rows of the step."""
    layout, k = layer.layout, layer.k[rows]
    if (apart := keeper(backend, layer)) is not None:
        apart.store_latent(k, layer.cache, slots, layout)
    elif layout.cache_dtype is None:
        layer.cache.flatten(0, 1).index_copy_(0, slots, k)
    else:
        cache_format.store(k, layer.cache, slots, layout.k_scale)


def load(backend: AttentionBackend, layer: LatentLayer, pages: torch.Tensor) -> torch.Tensor:
    """Return the latent vectors [pages, S, 1, R + P] of some pages."""
    if (apart := keeper(backend, layer)) is not None:
        return apart.read_latent(layer.cache, pages, layer.layout)
    return load_plain(layer.cache, pages, layer.layout)


def load_plain(cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return them from a cache in the usual order."""
    if layout.cache_dtype is None:
        return cache.index_select(0, pages)
    return cache_format.load(cache, pages, 1, layout.key_size, layout.k_scale, layout.dtype)


def _expand(backend: AttentionBackend, layer: LatentLayer, request: _Expanded) -> None:
    layout, rows = layer.layout, slice(request.start, request.stop)
    new, page_size = request.stop - request.start, layer.cache.shape[1]
    store(backend, layer, rows, request.slots)
    kept = load(backend, layer, request.pages)
    latent, turned = kept.flatten(0, 2)[: request.seq_len].tensor_split([layout.value_size], dim=-1)
    width, past = _expanded_width(layer, backend), request.seq_len - new
    assert width is not None, "what is too long is not expanded"
    weights = layer.weight.view(layer.q.shape[1], -1, layout.value_size)
    most = max(1, _EXPANDED_NUMBERS // (2 * width * request.seq_len))
    for first in range(0, layer.q.shape[1], most):
        count = min(most, layer.q.shape[1] - first)
        heads = slice(first, first + count)
        made = F.linear(latent, weights[heads].flatten(0, 1)).view(request.seq_len, count, -1)
        keys, values = made.tensor_split([layer.unturned], dim=-1)
        keys = _padded(torch.cat((keys, turned[:, None].expand(-1, count, -1)), dim=-1), width)
        values = _padded(values, width)
        # Any backend can read temporary pages in the plain format.
        k_cache = keys.new_zeros(len(request.pages), page_size, count, width)
        v_cache = torch.zeros_like(k_cache)
        k_cache.flatten(0, 1)[:past] = keys[:past]
        v_cache.flatten(0, 1)[:past] = values[:past]
        q, out = _padded(layer.q[rows, heads], width), keys.new_empty(new, count, width)
        plain = KVLayout(
            num_heads=count, num_kv_heads=count, key_size=width, value_size=width,
            scale=layout.scale, dtype=layout.dtype,
        )  # fmt: skip
        backend.run(q, keys[past:], values[past:], out, k_cache, v_cache, request.plan, plain)
        layer.out[rows, heads] = out[..., : layer.out.shape[2]]


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return x, padded with zeros to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
