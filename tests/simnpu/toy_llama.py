"""A small Llama cut by hand at attention, and its pieces captured as graphs at several sizes.

Shapes: T tokens, N query heads, K key/value heads, D head size, P pages, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, HEADS_KV, HEAD_SIZE, VOCABULARY, LAYERS = 32, 4, 2, 8, 61, 2
PAGES, PAGE_SIZE, MAX_TOKENS = 9, 128, 512
ROW = (HEADS + 2 * HEADS_KV) * HEAD_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What attention reads. Lengths are on the host; `slots` [T] and `pages` [B, pages] are int32
    on the device.
    """

    query_lens: list[int]
    seq_lens: list[int]
    slots: Tensor
    pages: Tensor
    caches: list[tuple[Tensor, Tensor]]


class Attention:
    """The toy op `toy::attention(q, k, v, out, layer)`: stores k and v, writes causal attention of
    the step into `out`.
    """

    step: Step | None = None

    @classmethod
    def on_cpu(cls, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        step = cls.step
        assert step is not None
        begin, caches = 0, [cache.view(-1, HEADS_KV, HEAD_SIZE) for cache in step.caches[layer]]
        for tokens, cache_ in zip((k, v), caches, strict=True):
            cache_[step.slots.long()] = tokens[: len(step.slots)]
        for new, length, pages in zip(
            step.query_lens, step.seq_lens, step.pages.tolist(), strict=True
        ):
            slots = torch.tensor(
                [pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(length)]
            )
            keys, values = (
                cache_[slots].repeat_interleave(HEADS // HEADS_KV, 1).transpose(0, 1)
                for cache_ in caches
            )
            before = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            query = q[begin : begin + new].transpose(0, 1)
            out[begin : begin + new] = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=before
            ).transpose(0, 1)
            begin += new

    @classmethod
    def on_npu(cls, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        step = cls.step
        assert step is not None
        tokens, (k_cache, v_cache) = sum(step.query_lens), step.caches[layer]
        torch.ops.atb._npu_reshape_and_cache(k[:tokens], v[:tokens], k_cache, v_cache, step.slots)
        result, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q[:tokens],
            k_cache.flatten(2),
            v_cache.flatten(2),
            atten_mask=causal_mask(),
            actual_seq_lengths=torch.tensor(step.query_lens).cumsum(0).tolist(),
            actual_seq_lengths_kv=step.seq_lens,
            block_table=step.pages,
            num_heads=HEADS,
            num_key_value_heads=HEADS_KV,
            input_layout="TND",
            block_size=PAGE_SIZE,
            scale=HEAD_SIZE**-0.5,
            sparse_mode=3,
        )
        out[:tokens].copy_(result)


@cache
def causal_mask() -> Tensor:
    """What npu_fused_infer_attention_score wants with sparse_mode 3."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")


@cache
def define_attention() -> torch.library.Library:
    """The library that holds `toy::attention`; a library that dies takes its ops with it."""
    library = torch.library.Library("toy", "DEF")
    library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")
    library.impl("attention", Attention.on_cpu, "CPU")
    library.impl("attention", Attention.on_npu, "PrivateUse1")
    library.impl("attention", lambda q, k, v, out, layer: None, "Meta")
    return library


class Between(NamedTuple):
    """What a piece hands on: attention's inputs, the buffer for its output, all [T, heads, D], and
    the residual [T, hidden].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    residual: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.o = (
            nn.Linear(HIDDEN, ROW, bias=False),
            nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False),
        )
        self.gate_up, self.down = (
            nn.Linear(HIDDEN, 4 * HIDDEN, bias=False),
            nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        )

    def begin(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Between:
        heads = self.qkv(self.before(residual)).view(-1, HEADS + 2 * HEADS_KV, HEAD_SIZE)
        q, k, v = heads.split([HEADS, HEADS_KV, HEADS_KV], 1)
        q = rotate(q, cos, sin)
        return Between(q, rotate(k, cos, sin), v.contiguous(), torch.empty_like(q), residual)

    def end(self, attended: Tensor, residual: Tensor) -> Tensor:
        residual = residual + self.o(attended.flatten(1))
        gate, up = self.gate_up(self.after(residual)).chunk(2, -1)
        return residual + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class ToyLlama(nn.Module):
    """Two layers; `piece` gives what lies between two attentions. Weights depend on nothing but the
    class.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        angles = torch.outer(
            torch.arange(MAX_TOKENS), 10000 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])
        self.requires_grad_(False)

    def piece(
        self,
        index: int,
        ids: Tensor,
        positions: Tensor,
        attended: Tensor | None,
        residual: Tensor | None,
    ) -> Any:
        """`Between` for the attention of layer `index`, or the last hidden states [T, hidden]."""
        residual = (
            self.embedding(ids) if index == 0 else self.layers[index - 1].end(attended, residual)
        )
        if index == LAYERS:
            return self.norm(residual)
        return self.layers[index].begin(residual, self.cos[positions], self.sin[positions])

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        attended = residual = None
        for index in range(LAYERS):
            between = self.piece(index, ids, positions, attended, residual)
            attended, residual = attend_into_buffer(between, index), between.residual
        hidden: Tensor = self.piece(LAYERS, ids, positions, attended, residual)
        return hidden


Attend = Callable[[Between, int], Tensor]


def attend_into_buffer(between: Between, layer: int) -> Tensor:
    """Right: the result goes into the buffer that the piece before allocated, whose address the
    next piece knows.
    """
    torch.ops.toy.attention(*between[:4], layer)
    return between.out


def attend_into_fresh_tensor(between: Between, layer: int) -> Tensor:
    """Wrong under graphs: each step's result lies at another address than the one the next piece
    was captured with.
    """
    fresh = torch.empty_like(between.q)
    torch.ops.toy.attention(between.q, between.k, between.v, fresh, layer)
    return fresh


class CapturedPieces:
    """The pieces of a model as graphs: one for each piece and size, in one pool, captured from the
    largest size down.
    """

    def __init__(
        self,
        model: ToyLlama,
        sizes: list[int],
        weak: Callable[[Tensor], Tensor],
        attend: Attend = attend_into_buffer,
    ) -> None:
        self.model, self.attend, self.weak = model, attend, weak
        self.ids = torch.zeros(max(sizes), dtype=torch.int64, device="npu")
        self.positions = torch.zeros_like(self.ids)
        self.pool, self.stream = torch.npu.graph_pool_handle(), torch.npu.Stream()
        self.graphs: dict[int, list[tuple[Any, Any]]] = {
            size: self._capture(size) for size in sorted(sizes, reverse=True)
        }

    def _capture(self, size: int) -> list[tuple[Any, Any]]:
        captured, attended, residual = [], None, None
        for index in range(LAYERS + 1):
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, pool=self.pool, stream=self.stream):
                output = self.model.piece(
                    index, self.ids[:size], self.positions[:size], attended, residual
                )
            if index == LAYERS:
                captured.append((graph, self.weak(output)))
            else:
                captured.append((graph, Between(*map(self.weak, output))))
                attended, residual = self.attend(output, index), output.residual
        return captured

    def run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [T, hidden] as the graphs' own memory: the next run of any size may
        write over them.
        """
        tokens = len(ids)
        size = min(size for size in self.graphs if size >= tokens)
        for buffer, values in ((self.ids, ids), (self.positions, positions)):
            buffer.zero_()
            buffer[:tokens].copy_(values)
        for index, (graph, output) in enumerate(self.graphs[size]):
            graph.replay()
            if index < LAYERS:
                self.attend(output, index)
        hidden: Tensor = output[:tokens]
        return hidden
