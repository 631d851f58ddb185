"""Brings the weights of linear layers into the layout of the device's own kernels; quantised ones
keep the bits they were stored in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..layers.linear import Embedding, FusedLinear, Linear
from ..loader.stored import StoredTensor
from ..progress import progress_bar

PLAIN = "bfloat16"
Kinds = Mapping[str, str]
"""By the name of a linear layer, what its weight is packed from: `PLAIN`, or a quantised format of
GGUF.
"""
NOTHING_PACKED: Kinds = MappingProxyType({})


def choose_kinds(
    model: nn.Module,
    kernels: LinearKernels,
    tensors: Sequence[StoredTensor],
    *,
    keep_quantized: bool,
) -> Kinds:
    """The layers that will be packed, and from what: quantised weights as they are where the
    kernels know them, if wanted.
    """
    stored = {tensor.name: tensor.kind for tensor in tensors} if keep_quantized else {}
    kinds = {}
    for prefix, linear, names in _linears(model):
        # Rows of one weight are of one kind.
        found = {stored.get(name) for name in names}
        kind = found.pop() if len(found) == 1 else None
        if kind is not None and kernels.layout(kind, linear.in_features) is not None:
            kinds[prefix] = kind
        elif kernels.layout(PLAIN, linear.in_features) is not None:
            kinds[prefix] = PLAIN
    return kinds


def packed_names(model: nn.Module, kinds: Kinds) -> set[str]:
    """The checkpoint's tensors that are packed as they were stored, and needed in no other form."""
    looked_up = {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if isinstance(module, Embedding)
    }
    return {
        name
        for prefix, _, names in _linears(model)
        if kinds.get(prefix, PLAIN) != PLAIN
        for name in names
    } - looked_up


def pack(
    model: nn.Module,
    kernels: LinearKernels,
    kinds: Kinds,
    tensors: Sequence[StoredTensor],
    *,
    progress: bool,
) -> None:
    """Pack the weights that `kinds` names; plain ones must have been filled. Raises `ValueError`
    where a file is broken.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    linears = [
        (linear, names, kinds[prefix])
        for prefix, linear, names in _linears(model)
        if prefix in kinds
    ]
    for linear, names, kind in progress_bar(
        linears, shown=progress, desc="packing weights", unit=" layers", leave=False
    ):
        parts = [linear.weight.data] if kind == PLAIN else [_blocks(stored[name]) for name in names]
        linear.use_packed(kernels.pack(kind, parts), _layout(kernels, kind, linear), kernels.op)


def pack_hollow(model: nn.Module, kernels: LinearKernels, kinds: Kinds) -> None:
    """Give the layers packed weights of the right shapes on the meta device."""
    for prefix, linear, _ in _linears(model):
        if prefix in kinds:
            layout = _layout(kernels, kinds[prefix], linear)
            shape = kernels.packed_shape(layout, linear.in_features, linear.out_features)
            linear.use_packed(
                torch.empty(shape, dtype=torch.uint8, device="meta"), layout, kernels.op
            )


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear, list[str]]]:
    """Each linear layer with its name and the checkpoint's names of its weight's parts."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, FusedLinear):
            parent = prefix.rpartition(".")[0]
            yield prefix, module, [f"{parent}.{part}.weight" for part in module.parts]
        elif isinstance(module, Linear):
            # A head that is the embedding is found under the embedding's name.
            yield prefix, module, [named[id(module.weight)]]


def _layout(kernels: LinearKernels, kind: str, linear: Linear) -> int:
    layout = kernels.layout(kind, linear.in_features)
    assert layout is not None
    return layout


def _blocks(tensor: StoredTensor) -> torch.Tensor:
    assert tensor.blocks is not None
    return tensor.blocks()
