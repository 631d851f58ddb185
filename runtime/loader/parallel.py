"""Splits a model over the ranks of an engine, by a rule for each kind of layer.

    split(model, Shard(rank=1, size=2))

The model is split before its weights are created. The first layer of a block keeps some rows of its
weight (heads, or intermediate columns). The last layer keeps the matching columns, and the summands
of all ranks are added up. Ranks differ only in the values of parameters and buffers, so their
traced forwards are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...kernels.collectives import TENSOR_PARALLEL, all_reduce
from ..config.model_registry import FALLBACK
from ..layers.gated_delta_net import GatedDeltaNet
from ..layers.latent_attention import LatentAttention
from ..layers.lightning_attention import LightningAttention
from ..layers.linear import CannotSplitError, Embedding, Linear, Stretch
from ..layers.mamba import MambaMixer
from ..layers.mamba2 import Mamba2Mixer
from ..layers.mlp import MLP, GatedMLP, GaussianTopKMLP, sum_columns
from ..layers.moe import FusedMoE, SparseMoE
from ..layers.norm import AllHeadsRMSNorm, GatedRMSNorm, LayerNorm
from ..layers.self_attention import SelfAttention
from ..layers.short_conv import ShortConv

if TYPE_CHECKING:
    from ..models.causal_lm import CausalLM

_BLOCK = 128  # The most columns that formats of weights keep together.
_TOGETHER = (256, _BLOCK, 64, 32)
_VOCABULARY_UNIT = 64  # A rank holds a multiple of this many rows of the vocabulary.


class Shard(NamedTuple):
    """Part `rank` of `size` of each layer that is split.

    Attributes:
        cuts_groups: Whether ranks may share the query heads of a key/value head unevenly
            (`group_size` of `KVLayout`).
        ep_size: Experts are split over this many groups of ranks, and the columns of each expert
            over the ranks of a group.
    """

    rank: int = 0
    size: int = 1
    cuts_groups: bool = False
    ep_size: int = 1

    def equal(self, whole: int) -> Stretch:
        """Return the part of this rank of `whole`, which `size` divides."""
        return Stretch(self.rank * (whole // self.size), whole // self.size, whole)


WHOLE = Shard()


def split(model: CausalLM, shard: Shard) -> None:
    """Reduce the model to what `shard` holds.

    Raises `CannotSplitError`, or `ValueError` if no part of the model can be split.
    """
    if shard.size == 1:
        return
    if model.config.architecture == FALLBACK:
        raise ValueError(
            "models that the code of transformers computes run on one rank; leave --tp-size out"
        )
    has_experts = any(isinstance(module, FusedMoE) for module in model.modules())
    if shard.ep_size > 1 and not has_experts:
        raise ValueError(
            f"--ep-size is {shard.ep_size}, but the model has no experts; leave --ep-size out"
        )
    for name, module in list(model.named_modules()):
        for kind, rule in _RULES.items():
            if isinstance(module, kind):
                rule(model, name, module, shard)


def _split_attention(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by key/value heads, each with its query heads.

    If there are fewer key/value heads than ranks, several ranks hold the same one. If they cannot
    be divided evenly, single query heads are distributed, or the last rank is padded with zeros.
    """
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, shard.size
    each = -(-kv_heads // size)
    skipped = 0
    # Whether a rank can compute its part of a shared head without the other ranks.
    is_alone = (
        layer.sinks is None
        and layer.slopes is None
        and not isinstance(layer.q_norm, AllHeadsRMSNorm | LayerNorm)
    )
    if shard.cuts_groups and is_alone and (cut := _cut_groups(layer, shard)):
        queries, kv, skipped = cut
    elif kv_heads > size and each * (size - 1) < kv_heads:
        kv = Stretch(shard.rank * each, each, kv_heads)
        queries = Stretch(*(number * (heads // kv_heads) for number in kv))
    elif size % kv_heads == 0 and heads % size == 0:
        kv = Stretch(shard.rank * kv_heads // size, 1, kv_heads)
        queries = shard.equal(heads)
    else:
        raise CannotSplitError(
            f"{name}: {heads} heads on {kv_heads} key/value heads cannot be split over {size} ranks"
        )
    rows, kv_rows = (Stretch(*(number * layer.head_dim for number in of)) for of in (queries, kv))
    # If the layer is gated, q_proj has a gate for each query.
    q_rows = Stretch(*(number * (1 + layer.gated) for number in rows))
    # A layer that reads the keys and values of another layer has only queries.
    layer.qkv_proj.hold_rows(
        {part: q_rows if part == "q_proj" else kv_rows for part in layer.qkv_proj.parts}
    )
    _sum_over_ranks(layer.o_proj, rows)
    layer.hold_heads(queries, kv, group=heads // kv_heads, skipped=skipped)
    _split_head_norm(layer, "q_norm", queries, shard)
    _split_head_norm(layer, "k_norm", kv, shard)


def _split_latent(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by query heads. Every rank keeps the latent vectors of all tokens."""
    if layer.num_heads % shard.size:
        raise CannotSplitError(
            f"{name}: {layer.num_heads} heads cannot be split over {shard.size} ranks"
        )
    heads = shard.equal(layer.num_heads)
    for linear in (layer.queries, layer.kv_b_proj):
        width = linear.out_features // heads.whole
        linear.hold_rows({"": Stretch(*(number * width for number in heads))})
    width = layer.o_proj.in_features // heads.whole
    _sum_over_ranks(layer.o_proj, Stretch(*(number * width for number in heads)))
    layer.num_heads = heads.size


def _cut_groups(layer: SelfAttention, shard: Shard) -> tuple[Stretch, Stretch, int] | None:
    """Return query heads, key/value heads, and how many queries of the first one are another
    rank's.

    Return None if the key/value heads divide evenly, if ranks would need different numbers of them,
    or if a block of weights would be cut.
    """
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    each, group = -(-heads // shard.size), heads // kv_heads
    if kv_heads % shard.size == 0 or shard.size > kv_heads:
        return None
    if each * width % _BLOCK and heads * width % _BLOCK == 0:
        return None
    begins = range(0, each * shard.size, each)
    kv = [(begin // group, (min(begin + each, heads) - 1) // group + 1) for begin in begins]
    if begins[-1] >= heads or len({end - begin for begin, end in kv}) > 1:
        return None
    first, end = kv[shard.rank]
    begin = begins[shard.rank]
    return Stretch(begin, each, heads), Stretch(first, end - first, kv_heads), begin % group


def _split_head_norm(layer: SelfAttention, name: str, heads: Stretch, shard: Shard) -> None:
    """Split a norm that has weights for each head. Other norms stay whole."""
    norm = getattr(layer, name)
    if isinstance(norm, AllHeadsRMSNorm):
        rows = Stretch(*(number * layer.head_dim for number in heads))
        holders = max(1, heads.size * shard.size // heads.whole)
        setattr(layer, name, SplitAllHeadsRMSNorm(rows, norm.eps, holders))
    if isinstance(norm, LayerNorm):
        norm.hold_rows(heads)


def _split_mlp(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by intermediate columns.

    If they cannot be divided evenly, each rank gets a multiple of the columns that formats and
    kernels keep together, and the last rank is padded with zeros.
    """
    between, size = layer.down_proj.in_features, shard.size
    unit = next((unit for unit in _TOGETHER if between % unit == 0), _TOGETHER[-1])
    each = -(-between // (size * unit)) * unit if between % size else between // size
    if each * (size - 1) >= between:
        raise CannotSplitError(f"{name}: {between} columns cannot be split over {size} ranks")
    rows = Stretch(shard.rank * each, each, between)
    layer.opening.hold_rows(dict.fromkeys(layer.opening.parts, rows))
    layer.down_proj.hold_columns(rows)
    if isinstance(layer, GaussianTopKMLP):
        layer.sum_columns = lambda x: all_reduce(sum_columns(x), TENSOR_PARALLEL)
    if not _is_summand(model, name):
        _sum_results(layer.down_proj)


def _split_experts(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    groups, each = shard.ep_size, max(shard.size // shard.ep_size, 1)
    experts, between = layer.num_experts, layer.down_proj.in_features
    if shard.size % groups or experts % groups or between % each:
        raise CannotSplitError(
            f"{name}: {experts} experts of {between} columns cannot be split over {groups} groups "
            f"of {each} ranks"
        )
    layer.hold(
        Shard(shard.rank // each, groups).equal(experts),
        Shard(shard.rank % each, each).equal(between),
    )
    if not _is_summand(model, name):
        _sum_results(layer)


def _split_mixture(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Sum up the results of the experts and of the shared experts in one call."""
    _sum_results(layer)


def _is_summand(model: CausalLM, name: str) -> bool:
    """Whether a module is part of a mixture, whose results are summed up together."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), SparseMoE)


def _split_short_conv(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by channels. If they do not divide evenly, every rank holds the whole layer."""
    if layer.channels % shard.size:
        return
    own = shard.equal(layer.channels)
    layer.in_proj.hold_rows(_sections("", [own, own, own]))
    layer.conv.hold_rows([own])
    _sum_over_ranks(layer.out_proj, own)
    layer.channels = own.size


def _split_mamba(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by channels.

    The inputs of dt, b and c depend on all channels, so they are summed over the ranks.
    """
    if layer.sizes.inner % shard.size:
        return
    own = shard.equal(layer.sizes.inner)
    layer.in_proj.hold_rows(_sections("", [own, own]))
    layer.conv1d.hold_rows([own])
    layer.dt_proj.hold_rows({"": own})
    layer.hold_channels(own)
    _sum_over_ranks(layer.x_proj, own)
    _sum_over_ranks(layer.out_proj, own)


def _split_mamba2(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by heads. Ranks that share a group hold the same b and c."""
    sizes, size, norm = layer.sizes, shard.size, layer.norm
    groups = max(sizes.groups, size)
    if sizes.heads % size or groups % size or groups % sizes.groups:
        return
    if norm is not None and norm.groups != 1 and norm.groups % size:
        return
    heads = shard.equal(sizes.heads)
    each = max(1, sizes.groups // size)
    group = Stretch(shard.rank * sizes.groups // size, each, sizes.groups)
    inner = Stretch(*(number * sizes.head_dim for number in heads))
    shared = Stretch(*(number * sizes.state for number in group))
    layer.in_proj.hold_rows(_sections("", [inner, inner, shared, shared, heads]))
    layer.conv1d.hold_rows(list(_sections("", [inner, shared, shared]).values()))
    layer.hold_heads(heads, group.size)
    if norm is not None and norm.groups == 1:
        layer.norm = SplitGatedRMSNorm(inner, norm)
    elif norm is not None:
        norm.hold_rows(inner, norm.groups // size)
    _sum_over_ranks(layer.out_proj, inner)


def _split_lightning(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by heads."""
    if layer.num_heads % shard.size:
        return
    heads = shard.equal(layer.num_heads)
    rows = Stretch(*(number * layer.head_dim for number in heads))
    layer.qkv_proj.hold_rows({"": Stretch(*(3 * number for number in rows))})
    layer.output_gate.hold_rows({"": rows})
    layer.norm = SplitAllHeadsRMSNorm(rows, layer.norm.eps, holders=1)
    layer.hold_heads(heads)
    _sum_over_ranks(layer.out_proj, rows)


def _split_delta_net(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    """Split by key heads, each with its value heads."""
    sizes = layer.sizes
    if sizes.key_heads % shard.size:
        return
    for linear, parts in layer.sections().items():
        rows = [_sections(part, map(shard.equal, found)) for part, found in parts.items()]
        linear.hold_rows({part: stretch for found in rows for part, stretch in found.items()})
    channels = map(shard.equal, (sizes.keys, sizes.keys, sizes.values))
    layer.conv1d.hold_rows(list(_sections("", channels).values()))
    layer.hold_heads(shard.equal(sizes.key_heads), shard.equal(sizes.value_heads))
    _sum_over_ranks(layer.out_proj, shard.equal(sizes.values))


def _sections(part: str, held: Iterable[Stretch]) -> dict[str, Stretch]:
    """Convert stretches of sections, which lie one after another in a tensor, to stretches of the
    tensor.
    """
    held = list(held)
    wholes = [stretch.whole for stretch in held]
    whole, begins = sum(wholes), [0, *accumulate(wholes)]
    return {
        f"{part}#{number}": Stretch(begin + stretch.begin, stretch.size, whole)
        for number, (begin, stretch) in enumerate(zip(begins, held, strict=False))
    }


def _split_vocabulary(model: CausalLM, name: str, layer: Any, shard: Shard) -> None:
    is_of_head = layer is model.model.embed_tokens
    rows = vocabulary_rows(layer.vocab_size, shard)
    if rows.size * (shard.size - 1) >= rows.whole:
        raise CannotSplitError(
            f"{name}: a vocabulary of {rows.whole} tokens is too small for {shard.size} ranks"
        )
    model.set_submodule(name, VocabularyParallelEmbedding(layer, rows))
    if is_of_head:
        model.lm_head.hold_rows({"": rows})


_RULES: dict[type[nn.Module], Callable[[CausalLM, str, Any, Shard], None]] = {
    SelfAttention: _split_attention,
    LatentAttention: _split_latent,
    GatedMLP: _split_mlp,
    MLP: _split_mlp,
    SparseMoE: _split_mixture,
    FusedMoE: _split_experts,
    Embedding: _split_vocabulary,
    ShortConv: _split_short_conv,
    MambaMixer: _split_mamba,
    Mamba2Mixer: _split_mamba2,
    LightningAttention: _split_lightning,
    GatedDeltaNet: _split_delta_net,
}


def vocabulary_rows(vocab_size: int, shard: Shard) -> Stretch:
    """Return the token ids whose rows and logits a rank holds. The last rank may be padded."""
    each = -(-vocab_size // (shard.size * _VOCABULARY_UNIT)) * _VOCABULARY_UNIT
    return Stretch(shard.rank * each, each, vocab_size)


def _sum_over_ranks(layer: Linear, columns: Stretch) -> None:
    layer.hold_columns(columns)
    _sum_results(layer)


def _sum_results(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _, inputs, result: all_reduce(result, TENSOR_PARALLEL))


class SplitAllHeadsRMSNorm(AllHeadsRMSNorm):
    """A part of `AllHeadsRMSNorm`: the numbers `rows`, each of which `holders` ranks hold."""

    def __init__(self, rows: Stretch, eps: float, holders: int) -> None:
        super().__init__(rows.size, eps)
        self.held_rows, self.holders = rows, holders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten(1).float()
        squares = all_reduce(wide.square().sum(-1, keepdim=True), TENSOR_PARALLEL)
        mean = squares / (self.holders * self.held_rows.whole)
        return ((wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight).view(x.shape)


class SplitGatedRMSNorm(GatedRMSNorm):
    """A part of a `GatedRMSNorm` with one group: the numbers `rows`."""

    def __init__(self, rows: Stretch, whole: GatedRMSNorm) -> None:
        super().__init__(rows.size, whole.eps, norm_first=whole.norm_first)
        self.held_rows = rows

    def mean_square(self, parts: torch.Tensor) -> torch.Tensor:
        assert self.held_rows is not None
        squares = all_reduce(parts.square().sum(-1, keepdim=True), TENSOR_PARALLEL)
        return squares / self.held_rows.whole


class VocabularyParallelEmbedding(Embedding):
    """An embedding of which each rank holds some rows, from `first` [1] int64 on.

    The ids of other ranks give zeros, and the results of all ranks are added up.
    """

    first: torch.Tensor

    def __init__(self, whole: Embedding, rows: Stretch) -> None:
        super().__init__(whole.vocab_size, whole.hidden_size)
        self.held_rows = rows
        # A buffer, because a constant would become part of the traced forward.
        self.register_buffer("first", torch.tensor([rows.begin]), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        own = input_ids - self.first
        is_other = (own < 0) | (own >= self.num_rows)
        rows = self.look_up(own.masked_fill(is_other, 0))
        return all_reduce(rows.masked_fill(is_other.unsqueeze(-1), 0.0), TENSOR_PARALLEL)
