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
    """The requests that the tokens of one step belong to, and where their keys and values lie.

    Tokens are laid out request after request. Request b has `query_lens[b]` new tokens. With them
    its length is `seq_lens[b]`, so its first new token has position `seq_lens[b] - query_lens[b]`.
    The next step may be written into the same tensors and lists, so a plan is valid for one step
    only.

    Attributes:
        query_lens, seq_lens: Lists on the host, by request.
        block_table: [B, max pages] page numbers in order, padded at the end. Pages that no window
            reaches any more are padding too.
        slot_mapping: [T] page * S + offset of each new token.
        state_slots: [B] int64 slots of the recurrent states (`kernels.state`). None if the model
            has no such layers.
        window: The same step for sliding-window layers, if these have pages of their own.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor | None = None
    window: AttentionMetadata | None = None


# Takes queries [n, H, B, D], keys [n, H, L, D] of whole sequences, and the position of the first
# query. Returns what is added to the scores: [n or 1, H, B, L], in the dtype of the queries.
Bias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one layer keeps of each token, and how its queries read it. Layers of a model may
    differ.

    The layer keeps `num_kv_heads` keys of `key_size` numbers and as many values of `value_size`.
    Each key/value head is read by `group` consecutive query heads.

    Attributes:
        scale: Factor of the products of queries and keys.
        dtype: dtype of the queries.
        window: A query sees itself and the `window - 1` tokens before it. None: all tokens before.
        chunked: A query sees no token before the last multiple of `window` (`chunked_attention`).
        softcap: Scores become softcap * tanh(score / softcap).
        sinks: [H] float32, one more score per head, which takes weight and adds no value.
        slopes: [H] float32 (ALiBi, arXiv:2108.12409). A score is lowered by the distance of key and
            query times the head's slope, after scaling and softcap.
        bias: Added to scaled scores. Only `VarlenAttention` supports it, without a window.
        cache_dtype: 8-bit dtype of the cache (`cache_format`). None: `dtype`.
        k_scale, v_scale: Factors of numbers that are kept in float8.
        causal: False for encoders, whose queries also see as many tokens after them. Only
            `VarlenAttention` supports that.
        latent: MLA (arXiv:2405.04434). There is one head, and its value is the first `value_size`
            numbers of its key and is not stored separately.
        selected: DeepSeek V3.2, latent layers only. A query sees at most this number of tokens,
            those that an index scores highest. None: all. `kernels.sparse_attention` makes the
            choice; backends ignore it.
        index_size: Numbers of a token's key in the index, kept in `dtype` beside the latent vector.
            0: the layer reuses the choice of the layer before it.
        shares: Gemma 3n. Number of an earlier layer whose cache this layer reads; it has no cache
            of its own. Each step passes the earlier layer's new keys and values, which are stored
            again in the same slots.
        narrow_spans: Gemma 4. The tokens of an image see each other within the window only, and a
            layer without a window is causal (`span_attention`).
        group_size: Query heads per key/value head, if a rank's layer has incomplete groups. None:
            `num_heads / num_kv_heads`. Only backends of platforms with `cuts_head_groups` support
            incomplete groups; the last group has the heads that are left.
        skipped_heads: Query heads of the first group that belong to another rank.

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
    narrow_spans: bool = False
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
        """Return a layout whose keys and values have one size and whose scale is 1 / sqrt(size)."""
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
        """Query heads per key/value head."""
        return self.group_size or self.num_heads // self.num_kv_heads

    @property
    def is_plain(self) -> bool:
        """Whether values are weighted by a softmax of the scores and nothing else."""
        return self.softcap is None and self.sinks is None and self.slopes is None

    @property
    def token_bytes(self) -> int:
        """Bytes that the layer keeps per token."""
        if self.shares is not None:
            return 0
        dtype = self.cache_dtype or self.dtype
        kept = (self.key_size,) if self.latent else (self.key_size, self.value_size)
        of_index = row_bytes(self.index_size, self.dtype)
        return self.num_kv_heads * sum(row_bytes(size, dtype) for size in kept) + of_index


class AttentionBackend(Protocol):
    """One way to compute paged attention."""

    def plan(self, metadata: AttentionMetadata, page_size: int) -> Any:
        """Return the plan that all layers of this step share."""
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
        """Store the new keys and values, then write causal attention into out [T, H, E].

        k [T, K, D] and v [T, K, E] go to their slots of the caches [P, S, K, D] and [P, S, K, E],
        or to caches in the form of `cache_format`. q [T, H, D] attends to what is stored. In a
        latent layer v and v_cache are the beginnings of k and k_cache, and nothing is stored twice.
        """
        ...


@runtime_checkable
class QuantizedAttention(AttentionBackend, Protocol):
    """A backend that writes its result in 8 bits."""

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
        """Do what `run` does, with out [T, H, E] in an 8-bit dtype. The result equals
        `reference.quantize_static` of the result in q's dtype, with `scale` [1] float32.
        """
        ...


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose decodes can be captured in a graph.

    What changes from step to step lies in tensors with fixed addresses. If some of it does not, the
    plan is a `HostPlan`.

    One plan serves the graphs of all batch sizes. `run` with such a plan takes q [N, H, D] for any
    N up to its `max_batch_size`; row b is the one new token of request b. The launches depend only
    on N and on the plan's sizes, never on lengths. `run` keeps no memory after the call and never
    waits for the device.
    """

    def capture_plan(
        self, max_batch_size: int, max_pages: int, page_size: int, device: torch.device
    ) -> Any:
        """Return a plan with fixed addresses for up to `max_batch_size` decodes with up to
        `max_pages` pages each.

        Until it is updated, the plan describes no request.
        """
        ...

    def update_plan(self, plan: Any, metadata: AttentionMetadata, batch_size: int) -> None:
        """Write the requests of this step into `plan` on the current stream, before the graph of
        `batch_size` rows is replayed.

        Every request has one new token. Rows after the last request are padding: `run` returns
        finite numbers for them, and may store their keys and values only in page 0, which belongs
        to no request.
        """
        ...


@runtime_checkable
class HostPlan(Protocol):
    """A capture plan with values outside of tensors. They must be passed to the graph before each
    replay (`kernels.graph.HostArguments`).
    """

    def host_arguments(self, batch_size: int) -> Mapping[str, Any]:
        """Return these values for the first `batch_size` rows, by the kernels' names."""
        ...
