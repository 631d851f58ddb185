"""Chooses the format in which the weight of each linear layer is kept.

Each format of checkpoints is a file of this package (see `config.quantization_registry`). It maps
the name of a layer to a kind, one line of text. From the kind, `make_method` makes the
`LinearMethod`, here and in the process that compiles:

    scheme = read_scheme(config["quantization_config"])          # fp8.py, by its QUANT_METHOD
    scheme("model.layers.0.mlp.down_proj")                       # "w8a8 float8_e4m3fn block ..."
    make_method("w8a8 float8_e4m3fn block group weight_scale_inv")    # w8a8.py, by its first word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...kernels import ops
from ...kernels.linear import LinearKernels
from ..config.quantization_registry import PLAIN, Scheme
from ..layers.linear import (
    CannotSplitError,
    Embedding,
    Linear,
    LinearMethod,
    StoredTensor,
    part_name,
)
from ..layers.moe import ExpertLinear
from ..models.causal_lm import CausalLM
from . import nvfp4
from .gguf import GGUFBlocks, kind_of, packed_kind
from .on_load import COLUMNS, finished_kind
from .unquantized import WIDENED, Unquantized, Widened

# Kinds (`LinearMethod.kind`) by names of linear layers. Layers that are missing are `PLAIN`.
Kinds = Mapping[str, str]
NOTHING_PACKED: Kinds = MappingProxyType({})
_ANY_WIDTH = 128
_LEAST_BLOCK = 32  # Columns of GGUF's smallest blocks.
# Suffix of a kind that is packed here, but that can also be multiplied without `LinearKernels`.
_PACKED = " packed"


def make_method(kind: str) -> LinearMethod:
    """Return the method of a layer of this kind.

    Kinds are made by this package and never read from a file.
    """
    kind = kind.removesuffix(_PACKED)
    if kind == PLAIN:
        return Unquantized()
    name, _, rest = kind.partition(" ")
    if not rest:
        return GGUFBlocks(name)
    if kind.startswith(WIDENED):
        return Widened(make_method(rest))  # type: ignore[arg-type]
    method: LinearMethod = import_module(f"{__package__}.{name}").make_method(kind)
    return method


def stored_kinds(
    model: CausalLM, kernels: LinearKernels | None, tensors: Sequence[StoredTensor]
) -> Kinds:
    """Return the layers of a .gguf file whose quantised weights stay as they are stored.

    The kernels must know the formats of all parts. There are none if the device multiplies numbers
    faster (`LinearKernels.keeps_blocks`), or if a split cuts blocks of 256 columns. Raises
    `CannotSplitError` if a split cuts smaller blocks.
    """
    if kernels is None or not kernels.keeps_blocks:
        return NOTHING_PACKED
    stored = {tensor.name: tensor.kind for tensor in tensors if tensor.blocks is not None}
    kinds = {}
    for prefix, linear in named_linears(model):
        found = [stored.get(weight_name(model, prefix, part)) for part in linear.parts]
        formats = [name for name in found if name is not None]
        own = linear.usable(kernels)
        if len(formats) < len(found) or own is None:
            continue
        kind = kind_of(formats)
        if kind not in formats and isinstance(linear, ExpertLinear):
            continue
        packed = packed_kind(kind, list(linear.parts.values()))
        if own.layout(packed, linear.whole_in_features) is not None:
            if own.layout(packed, linear.in_features) is not None:
                kinds[prefix] = kind
            elif linear.in_features % _LEAST_BLOCK:
                raise _cut(prefix, linear, f"blocks of {kind}")
    for prefix, embedding in named_embeddings(model):
        table = stored.get(name := f"{prefix}.weight")
        if (
            table is not None
            and kernels.embedding_op is not None
            and kernels.layout(table, embedding.hidden_size) is not None
            # A tied head that is not packed needs the numbers.
            and all(
                kinds.get(head.rpartition(".")[0]) == table
                for head, other in model.tied_weights.items()
                if other == name
            )
        ):
            kinds[prefix] = table
    return kinds


def _cut(prefix: str, linear: Linear, unit: str) -> CannotSplitError:
    return CannotSplitError(
        f"{prefix}: {linear.in_features} of its {linear.whole_in_features} columns a rank are no "
        f"whole {unit}"
    )


class Products(NamedTuple):
    """What multiplies the weights of a model.

    Attributes:
        dtype: The dtype of activations.
        kernels: The kernels of `device`, if it has any.
        lacking: See `Platform.lacking_dtypes`.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: LinearKernels | None = None
    lacking: Collection[torch.dtype] = ()

    def take(self, kind: str) -> bool:
        """Whether there is a product for a kind "w8a8 ..." or "weight_only ...".

        Plain torch widens the whole weight at each step. It counts only for float32, where exact
        numbers matter more than speed.
        """
        op, dtype = "weight_only_linear", torch.uint8
        if kind.startswith("w8a8"):
            op, dtype = "scaled_linear", getattr(torch, kind.split()[1])
        return dtype not in self.lacking and (
            self.dtype == torch.float32
            or ops.has_kernel(self.device.type, op)
            or _packs(self.kernels, kind)
        )

    def take_layer(self, kind: str, linear: Linear) -> bool:
        """Whether there is a product for a layer. Quantised experts and NVFP4 must be packed."""
        if linear.is_read_as_numbers:
            return False
        if nvfp4.FP4 in kind:
            return True
        if isinstance(linear, ExpertLinear) or kind.startswith("nvfp4"):
            return _packs(linear.usable(self.kernels), kind, linear.in_features)
        return self.take(kind)

    def take_fp4(self, linear: Linear) -> bool:
        """Whether there is a product of activations of 4 bits for an NVFP4 layer."""
        is_dense = not isinstance(linear, ExpertLinear) and not linear.is_read_as_numbers
        halves = (torch.bfloat16, torch.float16)
        return is_dense and self.dtype in halves and nvfp4.takes_fp4(linear, self.device)


def _packs(kernels: LinearKernels | None, kind: str, columns: int = _ANY_WIDTH) -> bool:
    """Whether kernels pack weights of a kind. `columns` matters to NVFP4 alone."""
    if kernels is None:
        return False
    if kind.startswith("nvfp4"):
        return nvfp4.stored_kind(kernels, columns) is not None
    packed = ["Q4_1", "weight_only 4 32 zeros"]
    if kind.startswith("w8a8"):
        packed = ["int8" if kind.split()[1] == "int8" else "fp8_e4m3"]
    return any(kernels.layout(name, _ANY_WIDTH) is not None for name in packed)


def scheme_kinds(
    model: CausalLM, scheme: Scheme | None, quantization: str, products: Products
) -> Kinds:
    """Return the kinds of a folder whose `quantization_config` is `scheme` (None: weights of 16
    bits).

    `quantization` is the value of --quantization. Layers that no product takes are widened. A head
    that is tied to the embedding is quantised only on load, as a copy. Raises `ValueError` if parts
    that are multiplied together differ in kind.
    """
    if quantization in COLUMNS:
        return on_load_kinds(model, quantization, products)
    kinds: dict[str, str] = {}
    if scheme is None:
        return kinds
    for prefix, linear in named_linears(model):
        if weight_name(model, prefix, "") in model.tied_weights.values():
            continue
        names = [part_name(prefix, part) for part in linear.parts]
        found = {name: scheme(name) for name in names}
        (first, kind), *others = found.items()
        if other := next((name for name, other in others if other != kind), None):
            raise ValueError(
                f"quantization_config keeps {first} as {kind!r} and {other} as {found[other]!r}, "
                "which are multiplied as one; use a checkpoint that quantises them alike"
            )
        # Float8 checkpoints of DeepSeek do not say that routers have 16 bits.
        if nvfp4.FP4 in kind and (quantization == "none" or not products.take_fp4(linear)):
            kind = kind.removesuffix(nvfp4.FP4)
        if kind != PLAIN and not (linear.stays_in_16_bits and kind.startswith("w8a8")):
            is_widened = quantization == "none" or not products.take_layer(kind, linear)
            kinds[prefix] = WIDENED * is_widened + kind
    return kinds


def on_load_kinds(model: CausalLM, quantization: str, products: Products) -> Kinds:
    """Return the kinds of weights of 16 bits that --quantization quantises on load.

    Layers whose width does not fit are left out. A head that is tied to the embedding becomes a
    copy. Raises `ValueError` if no product takes the kind, and `CannotSplitError` if the width of a
    whole layer fits, but that of a rank does not.
    """
    if not products.take(finished_kind(quantization)):
        dtype = str(products.dtype).removeprefix("torch.")
        taken = [name for name in COLUMNS if products.take(finished_kind(name))]
        raise ValueError(
            f"--quantization {quantization}: no kernel multiplies such weights by {dtype} numbers "
            f"on {products.device.type} here; use {' or '.join([*taken, 'none'])}"
        )
    kinds, columns = {}, COLUMNS[quantization]
    for prefix, linear in named_linears(model):
        if linear.stays_in_16_bits or not products.take_layer(finished_kind(quantization), linear):
            continue
        if linear.whole_in_features % columns == 0:
            if linear.in_features % columns:
                raise _cut(prefix, linear, f"blocks of {columns}")
            kinds[prefix] = f"on_load {quantization}"
    return kinds


def create_weights(model: CausalLM, kinds: Kinds) -> None:
    """Give each layer a weight to load into. Linear layers get it from their method."""
    for prefix, embedding in named_embeddings(model):
        embedding.create(kinds.get(prefix))
    for name, other in model.tied_weights.items():
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, model.get_parameter(other))
    for prefix, linear in named_linears(model):
        linear.method = make_method(kinds.get(prefix, PLAIN))
        with split_errors(prefix, linear):
            linear.method.create(linear)


@contextmanager
def split_errors(prefix: str, linear: Linear) -> Iterator[None]:
    """Convert errors about the sizes of a layer that is split to `CannotSplitError`.

    The sizes of the whole layer are valid, so that the split is the cause.
    """
    try:
        yield
    except ValueError as error:
        if not linear.is_split:
            raise
        reason = str(error).partition(";")[0]
        raise CannotSplitError(f"{prefix}, split over ranks: {reason}") from None


def linear_kinds(model: nn.Module) -> Kinds:
    """Return the kinds of finished layers and embeddings, except numbers that are not packed."""
    return {
        prefix: linear.method.kind + _PACKED * (" " in linear.method.kind and linear.op is not None)
        for prefix, linear in named_linears(model)
        if linear.layout is not None or linear.method.kind != PLAIN
    } | {
        prefix: embedding.kind
        for prefix, embedding in named_embeddings(model)
        if embedding.kind is not None
    }


def describe(model: nn.Module) -> list[str]:
    """Return a line for each format with its number of layers and bytes, the largest first.

    If no layer is quantised, the list is empty.
    """
    layers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    are_numbers = True
    for _, linear in named_linears(model):
        name, was = _describe(linear.method.kind), None
        if isinstance(linear.method, Unquantized):
            name = name if linear.op else str(linear.weight.dtype).removeprefix("torch.")
            was = linear.method.widened_from
        if was is not None:
            name += f", widened from {_describe(was)}"
        are_numbers &= isinstance(linear.method, Unquantized) and was is None
        layers[name] += 1
        sizes[name] += sum(parameter.nbytes for parameter in linear.parameters())
    if are_numbers:
        return []
    return [
        f"{layers[name]} layer{'s' * (layers[name] > 1)} in {name}: {size / 2**20:,.1f} MiB"
        for name, size in sizes.most_common()
    ]


def _describe(kind: str) -> str:
    name, _, rest = kind.partition(" ")
    if not rest:
        return name
    module = import_module(f"{__package__}.{name}")
    return str(module.describe(kind)) if hasattr(module, "describe") else name


def named_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield each linear layer with its name."""
    for prefix, module in model.named_modules():
        if isinstance(module, Linear):
            yield prefix, module


def named_embeddings(model: nn.Module) -> Iterator[tuple[str, Embedding]]:
    """Yield each embedding with its name."""
    for prefix, module in model.named_modules():
        if isinstance(module, Embedding):
            yield prefix, module


def tied_head(model: Any, embedding: Embedding) -> Linear | None:
    """Return the head that shares its packed weight with an embedding, or None."""
    if embedding.kind is None or "lm_head.weight" not in model.tied_weights:
        return None
    head: Linear = model.lm_head
    owner = model.tied_weights["lm_head.weight"].rpartition(".")[0]
    is_tied = model.get_submodule(owner) is embedding and head.method.kind == embedding.kind
    return head if is_tied else None


def weight_name(model: CausalLM, prefix: str, part: str) -> str:
    """Return the checkpoint's name of a part of a weight.

    A head that is tied to the embedding has the name of the embedding.
    """
    name = f"{part_name(prefix, part)}.weight"
    return model.tied_weights.get(name, name)
