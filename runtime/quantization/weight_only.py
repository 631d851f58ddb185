"""Layers that multiply activations of 16 bits by weights of 4 or 8 bits.

Their loading from formats of packed words is here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels import ops
from ...kernels.linear import LinearKernels
from ..layers.linear import Axis, CannotSplitError, Linear, Place, StoredTensor
from .config import setting
from .grouped_weight import GroupedWeight, column_order, gguf_blocks, gguf_kind, widened

INT32 = (torch.int32,)
ACT_ORDER = "its columns are in act order, which a split would cut"
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class WeightOnly:
    """The `LinearMethod` of a loaded weight.

    If the device has kernels, the weight is packed, as it is or as GGUF's blocks. Otherwise it is
    kept for `ops.weight_only_linear`, with the parameters weight, weight_scale and weight_zero.

    A kind is "weight_only BITS COLUMNS SCALE ZEROS ORDER", such as "weight_only 4 128 float16 zeros
    in-order":

        COLUMNS  columns of a group
        ZEROS    symmetric if all zero points are 2^(BITS - 1), else zeros
        ORDER    reordered if the columns of the input are first sorted by the parameter
                 `input_order`, else in-order.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        _, bits, columns, scale, zeros, order = kind.split()
        self.bits, self.columns = int(bits), int(columns)
        self.scale_dtype: torch.dtype = getattr(torch, scale)
        self.is_ordered = order == "reordered"
        self._packed = f"weight_only {bits} {columns} {zeros}"
        self._block = gguf_kind(self.bits, self.columns, symmetric=zeros == "symmetric")

    @classmethod
    def of(cls, weights: Sequence[GroupedWeight], bits: int) -> WeightOnly:
        """Return the method of a layer that has the rows of all `weights`."""
        first = weights[0]
        columns = first.numbers.shape[1] * 8 // bits // first.scale.shape[1]
        half = 1 << (bits - 1)
        # Padding of a rank has the scale 0 and any zero point.
        is_symmetric = all(
            bool(((weight.zero == half) | (weight.scale == 0)).all()) for weight in weights
        )
        words = [
            str(first.scale.dtype).removeprefix("torch."),
            "symmetric" if is_symmetric else "zeros",
            "in-order" if first.order is None else "reordered",
        ]
        return cls(f"weight_only {bits} {columns} {' '.join(words)}")

    def create(self, layer: Linear) -> None:
        layer.hold("weight", (0,), torch.uint8)

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        return {}

    def finish(
        self,
        layer: Linear,
        kernels: LinearKernels | None,
        weights: Sequence[GroupedWeight] = (),
    ) -> None:
        """Set the parameters. `weights` are the rows of the layer, and empty on the meta device."""
        with layer.weight.device:
            if self.is_ordered:
                layer.hold("input_order", (layer.in_features,), torch.int64)
            if kernels is not None and kernels.layout(self._packed, layer.in_features) is not None:
                pairs = [
                    torch.stack((weight.scale.float(), weight.zero.float()), dim=-1)
                    for weight in weights
                ]
                layer.pack(kernels, self._packed, [weight.numbers for weight in weights], pairs)
            elif (
                kernels is not None
                and self._block is not None
                and kernels.layout(self._block, layer.in_features) is not None
            ):
                blocks = [gguf_blocks(weight, self._block) for weight in weights]
                layer.pack(kernels, self._block, blocks)
            else:
                rows, groups = layer.out_features, layer.in_features // self.columns
                layer.hold("weight", (rows, layer.in_features * self.bits // 8), torch.uint8)
                layer.hold("weight_scale", (rows, groups), self.scale_dtype)
                layer.hold("weight_zero", (rows, groups), torch.uint8)
        if not weights:
            return
        if (order := weights[0].order) is not None:
            layer.input_order.copy_(order)
        if layer.op is None:
            layer.weight.copy_(torch.cat([weight.numbers for weight in weights]))
            layer.weight_scale.copy_(torch.cat([weight.scale for weight in weights]))
            layer.weight_zero.copy_(torch.cat([weight.zero for weight in weights]))

    def widen(self, layer: Linear) -> torch.Tensor:
        raise AssertionError("the method of the file format widens its weights")

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if self.is_ordered:
            x = x.index_select(1, layer.input_order)
        if layer.op is not None:
            return layer.multiply_packed(x)
        return ops.weight_only_linear(
            x, layer.weight, layer.weight_scale, layer.weight_zero, layer.bias, self.bits
        )


class PackedFormat(ABC):
    """The `LinearMethod` that loads a format of packed words and leaves the layer `WeightOnly`."""

    kind: str
    bits: int
    columns: int  # Columns of a group. -1: all columns of a row.

    def __init__(self) -> None:
        self._stored: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)

    def create(self, layer: Linear) -> None:
        columns = self.columns_of(layer)
        if layer.in_features % columns or layer.in_features % 2:
            raise ValueError(
                f"quantization_config: groups of {columns} columns do not divide rows of "
                f"{layer.in_features} numbers; take another checkpoint"
            )
        layer.hold("weight", (0,), torch.uint8)

    def columns_of(self, layer: Linear) -> int:
        return layer.in_features if self.columns == -1 else self.columns

    def groups(self, dim: int) -> Axis | None:
        """Return the axis of a tensor that has a number for each group of columns."""
        return None if self.columns == -1 else Axis(dim, self.columns)

    @abstractmethod
    def places(self, layer: Linear, part: str) -> Mapping[str, Place]: ...

    def order_place(
        self, layer: Linear, part: str, *, is_optional: bool, unset: int | None = None
    ) -> Place:
        """Return the place of the group of each column of the whole layer.

        If all numbers equal `unset`, the tensor is ignored. Raises `CannotSplitError` if columns
        are reordered and the layer is split by columns.
        """
        held, columns = layer.held_columns, layer.whole_in_features
        groups = 1 if self.columns == -1 else columns // self.columns

        def check(group_of: torch.Tensor) -> None:
            is_unset = unset is not None and bool((group_of == unset).all())
            if not is_unset and column_order(group_of, groups) is not None and held is not None:
                raise CannotSplitError(ACT_ORDER)

        return self.place(part, (columns,), INT32, check, is_optional=is_optional)

    @abstractmethod
    def unpack(self, layer: Linear, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        """Return a part of the layer, given its tensors by the last component of their names."""

    def place(
        self,
        part: str,
        shape: tuple[int, ...],
        dtypes: Collection[torch.dtype] = _SCALES,
        check: Callable[[torch.Tensor], object] | None = None,
        *,
        is_optional: bool = False,
        rows: Axis | None = None,
        columns: Axis | None = None,
    ) -> Place:
        """Return a place that keeps a tensor for `unpack`. `check` raises `ValueError` for wrong
        numbers.
        """
        keep = partial(self._keep, part, check)
        return Place([shape], keep, dtypes, is_optional, rows, columns)

    def _keep(
        self, part: str, check: Callable[[torch.Tensor], object] | None, stored: StoredTensor
    ) -> None:
        if check is not None:
            try:
                check((stored.unpadded or stored).read())
            except CannotSplitError as error:
                raise CannotSplitError(f"{stored.name.rpartition('.')[0]}: {error}") from None
            except ValueError as error:
                raise stored.fault(str(error)) from None
        self._stored[part][stored.name.rpartition(".")[2]] = stored

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        weights = self._read(layer)
        layer.method = method = WeightOnly.of(weights, self.bits)
        method.finish(layer, kernels, weights)

    def widen(self, layer: Linear) -> torch.Tensor:
        dtype = torch.get_default_dtype()
        return torch.cat([widened(weight, self.bits, dtype) for weight in self._read(layer)])

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the layer is not finished")

    def _read(self, layer: Linear) -> list[GroupedWeight]:
        """Return all parts. They are read only now, so that one layer at a time is in
        memory twice.
        """
        weights = []
        for part in layer.parts:
            stored = self._stored.pop(part)
            read = {name: tensor.read() for name, tensor in stored.items()}
            weights.append(self.unpack(layer, read))
            first, order = weights[0].order, weights[-1].order
            if first is not order and (
                first is None or order is None or not torch.equal(first, order)
            ):
                raise ValueError(
                    f"{next(iter(stored.values())).file}: the columns of {part} are in another "
                    f"order than those of {next(iter(layer.parts))}, which is multiplied together "
                    "with it; use a checkpoint without act order"
                )
        return weights


def group_size(config: Mapping[str, Any]) -> int:
    """Return the columns of a group by `quantization_config`, or a part of it. -1: all of a row."""
    size = setting(config, "group_size", int)
    if size != -1 and size < 1:
        raise ValueError(
            f"quantization_config: group_size must be -1 or more than 0, got {size}; download the "
            "model again"
        )
    return size


def words_of(numbers: int, bits: int) -> int:
    """Return how many words of 32 bits hold `numbers` numbers.

    Raises `ValueError` if the last word would not be full.
    """
    if numbers * bits % 32:
        raise ValueError(
            f"rows or columns of {numbers} numbers of {bits} bits do not fill words of 32 bits; "
            "take another checkpoint"
        )
    return numbers * bits // 32


def describe(kind: str) -> str:
    """Return the name that is shown to users."""
    _, bits, columns, _, zeros, order, *_ = kind.split()
    extra = ", with zero points" * (zeros == "zeros") + ", reordered" * (order == "reordered")
    return f"{bits} bits in groups of {columns}{extra}"


def make_method(kind: str) -> WeightOnly:
    return WeightOnly(kind)
