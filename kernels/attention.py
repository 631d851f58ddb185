"""The contract of attention backends: plan once per step, run once per layer.

Shapes: T tokens of the step, B requests, H query heads, K key/value heads, D numbers of a key, E of
a value, P pages, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from .cache_format import row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Who the tokens of one step belong to and where their keys and values lie. The next step may
    be written into its tensors and lists: what is planned from it is of one step.

    Tokens are laid out request after request. Request b has `query_lens[b]` new tokens; with them
    it is `seq_lens[b]` tokens long, so its first new token stands at position `seq_lens[b] -
    query_lens[b]`. The lists live on the host. `block_table` [B, max pages]: page numbers in order,
    the tail is padding. `slot_mapping` [T]: page * S + offset of each new token. `state_slots` [B]
    int64: where layers with a recurrent state find that of each request (`kernels.state`); None:
    the model has no such layers. `window`: the same step for layers with a sliding window, where
    their pages are others than those of the rest. Pages that no window reaches any more are padding
    of the table too.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor | None = None
    window: AttentionMetadata | None = None


Bias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Returns what is added to the scores of queries [n, H, B, D], the first of which stands at a
position, with keys [n, H, L, D] of whole sequences: [n or 1, H, B, L], in the dtype of the queries.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one layer keeps of each token, and how its queries read that. Layers of a model may
    differ in all of it.

    Kept are `num_kv_heads` keys of `key_size` numbers and as many values of `value_size`, in
    `cache_dtype`, one of `cache_format`; None: in `dtype`, that of the queries. `k_scale`,
    `v_scale`: what numbers in float8 are to be multiplied by. `scale`: of the products of queries
    and keys. `window`: a query sees itself and the `window - 1` tokens before it; None: all before
    it; `chunked`: no further back than to the last multiple of `window` (`chunked_attention`).
    `causal` False, of an encoder: it sees as many behind it too, and only `VarlenAttention`
    computes that. `softcap`: scores are held softly below it, cap * tanh(score / cap). `sinks` [H]
    float32: a score of each head that takes its weight from those of the keys and adds nothing.
    `slopes` [H] float32 (ALiBi, arXiv:2108.12409): each score is lowered by how many tokens the key
    stands before the query, times the slope of its head, once it is scaled and held.
    `bias` is added to scores that are scaled already; only `VarlenAttention` takes it, of layers
    without a window.

    `latent` (MLA, arXiv:2405.04434): of one head, whose value is the first `value_size` numbers of
    its key, and is kept there alone.

    `selected` (DeepSeek V3.2): a query sees at most so many of the tokens before it, those that an
    index scores highest; None: all of them. Of latent layers only. `index_size`: numbers of a
    token's key in the index, which is kept in `dtype` beside the latent vector; 0: the layer takes
    the choice of the layer before it. `kernels.sparse_attention` makes the choice, and backends
    know nothing of it.

    `shares` (Gemma 3n): the number of an earlier layer whose cache this layer reads. The layer has
    no cache of its own. Each step gives it the new keys and values of that earlier layer, which it
    stores again in the same slots.

    A key/value head is read by `group` query heads, one after another. Of a rank's layer the first
    one's first `skipped_heads` may be another rank's, the last one has all that are left, and
    `group_size` says how many belong together (None: as many as there are of each); only backends
    of platforms that have `cuts_head_groups` get such layers.

        KVLayout.of_heads(32, 8, 128, torch.bfloat16, window=4096)
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    dtype: torch.dtype
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    slopes: torch.Tensor | None = field(default=None, compare=False)
    bias: Bias | None = field(default=None, compare=False)
    cache_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    causal: bool = True
    latent: bool = False
    selected: int | None = None
    index_size: int = 0
    shares: int | None = None
    group_size: int | None = None
    skipped_heads: int = 0

    @classmethod
    def of_heads(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        *,
        window: int | None = None,
    ) -> KVLayout:
        """With keys and values of one size and products that are scaled by its root, as usual."""
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=head_size,
            value_size=head_size,
            scale=head_size**-0.5,
            dtype=dtype,
            window=window,
        )

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.group_size or self.num_heads // self.num_kv_heads

    @property
    def is_plain(self) -> bool:
        """Whether a softmax of scores is all that weighs values."""
        return self.softcap is None and self.sinks is None and self.slopes is None

    @property
    def token_bytes(self) -> int:
        """Bytes that the layer keeps of a token."""
        if self.shares is not None:
            return 0
        dtype = self.cache_dtype or self.dtype
        kept = (self.key_size,) if self.latent else (self.key_size, self.value_size)
        of_index = row_bytes(self.index_size, self.dtype)
        return self.num_kv_heads * sum(row_bytes(size, dtype) for size in kept) + of_index


class AttentionBackend(Protocol):
    """One way to compute paged attention."""

    def plan(self, metadata: AttentionMetadata, page_size: int) -> Any:
        """Whatever the layers of this step share."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        layout: KVLayout,
    ) -> None:
        """Store k [T, K, D] and v [T, K, E] at their slots of the caches [P, S, K, D] and
        [P, S, K, E], or what `cache_format` has in their place, then write causal attention of q
        [T, H, D] over what is stored into out [T, H, E]. Of a latent layer v and v_cache are the
        beginnings of k and k_cache, and nothing is stored twice.
        """
        ...


@runtime_checkable
class QuantizedAttention(AttentionBackend, Protocol):
    """A backend that writes its result in 8 bits itself."""

    def run_quantized(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        layout: KVLayout,
    ) -> None:
        """What `run` does, with out [T, H, E] of a dtype of 8 bits: the result by `scale` [1]
        float32, as `reference.quantize_static` makes it of the result in q's dtype.
        """
        ...


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decodes a graph can record: what changes from step to step lives in tensors
    that stay where they are.

    If not all of it can, the plan is a `HostPlan`.

    One plan serves the graphs of all batch sizes. `run` with such a plan takes q [N, H, D] for any
    N up to its `max_batch_size`, row b being the one new token of request b. What it launches
    depends on N and on the plan's sizes alone, never on lengths; it allocates nothing that outlives
    the call and never waits for the device.
    """

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> Any:
        """A plan with fixed addresses, for steps of up to `max_batch_size` decodes of up to
        `max_pages` pages each.

        Until it is updated it describes no request.
        """
        ...

    def update_plan(self, plan: Any, metadata: AttentionMetadata, batch_size: int) -> None:
        """Write the requests of this step into `plan`, on the current stream, before the graph of
        `batch_size` rows is replayed on it.

        Every request has one new token. Rows behind the last request are padding: what `run` gives
        for them is finite, and if it stores their keys and values at all, then in page 0, which
        belongs to no request.
        """
        ...


@runtime_checkable
class HostPlan(Protocol):
    """A capture plan that is not all tensors: a graph must be told the rest before each replay
    (`kernels.graph.HostArguments`).
    """

    def host_arguments(self, batch_size: int) -> Mapping[str, Any]:
        """What the last update of the plan says of its first `batch_size` rows, by the names that
        the kernels give it.
        """
        ...
