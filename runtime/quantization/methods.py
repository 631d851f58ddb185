"""Which format each linear layer's weight is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Linear, StoredTensor
from ..models.llama import LlamaForCausalLM
from .gguf import GGUFBlocks
from .unquantized import Unquantized

PLAIN = Unquantized.kind
Kinds = Mapping[str, str]
"""By the name of a linear layer, what its weight is packed from: `PLAIN`, or a quantised format of
GGUF.
"""
NOTHING_PACKED: Kinds = MappingProxyType({})


def choose_kinds(
    model: LlamaForCausalLM, kernels: LinearKernels | None, tensors: Sequence[StoredTensor]
) -> Kinds:
    """The layers whose quantised weights are kept as they are: where all parts are of one format
    that the kernels know.
    """
    stored = {tensor.name: tensor.kind for tensor in tensors}
    kinds = {}
    for prefix, linear in named_linears(model):
        # Rows of one weight are of one kind.
        found = {stored.get(weight_name(model, prefix, part)) for part in linear.parts}
        kind = found.pop() if len(found) == 1 else None
        if kernels and kind and kernels.layout(kind, linear.in_features) is not None:
            kinds[prefix] = kind
    return kinds


def create_weights(model: nn.Module, kinds: Kinds) -> None:
    """Give each linear layer its method, and a weight to load into."""
    for prefix, linear in named_linears(model):
        kind = kinds.get(prefix, PLAIN)
        linear.method = Unquantized() if kind == PLAIN else GGUFBlocks(kind)
        linear.method.create(linear)


def packed_kinds(model: nn.Module) -> Kinds:
    """What each packed layer is packed from."""
    return {
        prefix: linear.method.kind
        for prefix, linear in named_linears(model)
        if linear.layout is not None
    }


def named_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Each linear layer with its name."""
    for prefix, module in model.named_modules():
        if isinstance(module, Linear):
            yield prefix, module


def weight_name(model: LlamaForCausalLM, prefix: str, part: str) -> str:
    """What the checkpoint calls a part of a linear layer's weight: a head that is tied to the
    embedding is found under the embedding's name.
    """
    name = f"{part_name(prefix, part)}.weight"
    return model.tied_weights.get(name, name)


def part_name(prefix: str, part: str) -> str:
    """The checkpoint's name of a part of the layer `prefix`."""
    return f"{prefix.rpartition('.')[0]}.{part}" if part else prefix
