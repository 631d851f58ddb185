"""Layers that are one weight matrix, and the contract of weight formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import ops
from ...kernels.linear import LinearKernels


def rounded(value: float) -> float:
    """Return `value` rounded to the dtype of the weights.

    While a model is made, this dtype is torch's default.
    """
    return torch.tensor(value, device="cpu").item()


def weight(*shape: int) -> nn.Parameter:
    """Return an uninitialised parameter with torch's default dtype and device."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        name: The name in the checkpoint, by the convention of Hugging Face.
        copy_to: Writes the values into a contiguous tensor of the same shape and any dtype and
            device, in any thread. Raises `ValueError` if the file is damaged.
        dtype: The dtype of the values that `copy_to` reads.
        kind: The quantised format of GGUF, such as "Q4_1", or None for numbers.
        blocks: Returns a quantised tensor as it is stored, without `factor`: [rows, bytes] uint8.
        cut: Returns a part, given a slice for each dimension. Only this part is read from the file.
        unpadded: The stored part of a tensor that is followed by zeros that are not in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[torch.Tensor], None]
    dtype: torch.dtype = torch.float32
    kind: str | None = None
    blocks: Callable[[], torch.Tensor] | None = None
    factor: float = 1.0
    cut: Callable[[tuple[slice, ...]], StoredTensor] | None = None
    unpadded: StoredTensor | None = None

    def part(self, index: tuple[slice, ...]) -> StoredTensor:
        """Return the part that is given by a slice for each dimension."""
        if (cut := self.cut) is not None:

            def within(inner: tuple[slice, ...]) -> StoredTensor:
                both = zip(index, inner, strict=True)
                return cut(tuple(slice(a.start + b.start, a.start + b.stop) for a, b in both))

            return cut(index)._replace(name=self.name, cut=within)

        def copy_to(target: torch.Tensor) -> None:
            whole = torch.empty(self.shape, dtype=self.dtype, device=target.device)
            self.copy_to(whole)
            target.copy_(whole[index])

        shape = tuple(part.stop - part.start for part in index)
        return self._replace(shape=shape, copy_to=copy_to, blocks=None)

    def read(self) -> torch.Tensor:
        """Return a copy in host memory."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(values)
        return values

    def fault(self, text: str) -> ValueError:
        """Return the error to raise if the numbers of the tensor are wrong."""
        return ValueError(f"{self.file}: the tensor {self.name} {text}; download the model again")


NUMBERS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


class Axis(NamedTuple):
    """The dimension of a tensor along which the rows, or the columns, of a weight lie.

    An entry of the tensor belongs to `unit` rows or columns.
    """

    dim: int
    unit: int = 1


class Stretch(NamedTuple):
    """`size` rows or columns of `whole`, beginning at `begin`. Zeros follow the last one."""

    begin: int
    size: int
    whole: int


class CannotSplitError(ValueError):
    """A layer cannot be split over that many ranks. The message names no remedy."""


class Place(NamedTuple):
    """The destination of a tensor of a checkpoint.

    Attributes:
        shapes, dtypes: What the tensor may have.
        load: Takes the tensor, in any thread. Small tensors come first, so that wrong scales are
            found before weights are read. Raises `StoredTensor.fault`.
        rows, columns: Axes along which a rank takes a part. None: it takes the whole tensor.
    """

    shapes: Sequence[tuple[int, ...]]
    load: Callable[[StoredTensor], None]
    dtypes: Collection[torch.dtype] = NUMBERS
    is_optional: bool = False
    rows: Axis | None = None
    columns: Axis | None = None


class LinearMethod(Protocol):
    """How the weight of a linear layer is loaded, kept and multiplied. See `quantization/`.

        method.create(layer)
        for part in layer.parts:
            for name, place in method.places(layer, part).items():
                place.load(stored[part, name])    # from several threads
        method.finish(layer, kernels)
        y = layer.method.apply(layer, x)

    `apply` reads parameters of the layer. Their shapes and dtypes follow from `kind` and the sizes
    of the layer, because graphs are traced on a model that was created and finished without `load`.
    """

    @property
    def kind(self) -> str:
        """Identifies the method: `methods.make_method` makes an equal method from it."""
        ...

    def create(self, layer: Linear) -> None:
        """Give the layer an uninitialised weight with torch's default dtype and device."""
        ...

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        """Return the places of the tensors of a part, by the last component of their names, such as
        "weight" or "weight_scale". The bias is not among them.
        """
        ...

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        """Convert the weight into the form that `apply` reads, packed if the device has kernels for
        it.

        The layer may get another method. On the meta device only shapes change.
        """
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return [T, out] for x [T, in], by ops that passes can find in a graph."""
        ...


class StoredMethod(LinearMethod, Protocol):
    """A method whose weights can also be read as numbers."""

    def widen(self, layer: Linear) -> torch.Tensor:
        """Return the weight [out, in] float32. Called instead of `finish`."""
        ...


def part_name(prefix: str, part: str) -> str:
    """Return the checkpoint's name of a part of the layer `prefix`.

    A "#" in `part` is followed by the section of the tensor that a rank holds. This suffix is not
    in the name.
    """
    part = part.partition("#")[0]
    return f"{prefix.rpartition('.')[0]}.{part}" if part else prefix


class QuantizedInput(nn.Module):
    """Quantises the input of a layer to 8 bits.

    The scale [1] float32 comes from the checkpoint. Without it, a scale for each `group` columns of
    a row is computed at run time.
    """

    def __init__(self, dtype: torch.dtype, group: int, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.dtype, self.group = dtype, group
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers [T, in] and scales ([1] or [T, in / group] float32) of x [T, in]."""
        if self.scale is not None:
            return ops.quantize_static(x, self.scale, self.dtype), self.scale
        return ops.quantize_dynamic(x, self.group, self.dtype)


class Linear(nn.Module):
    """y = x W^T + b for x [T, in] and a weight [out, in], or the form of it that `method` keeps.

    In a layer that is split, `in_features`, `out_features` and `parts` are those of this rank.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter
    input_scale: nn.Parameter
    input_order: nn.Parameter
    method: LinearMethod
    # Whether the owner reads the weight itself. Such a weight is neither packed nor quantised.
    is_read_as_numbers = False

    # Whether the layer is a router or the like. Such a weight is not quantised on load. Checkpoints
    # in float8 do not quantise it either, but do not say so.
    stays_in_16_bits = False

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = {"": out_features}
        self.held_rows: Mapping[str, Stretch] = {}
        self.held_columns: Stretch | None = None
        self.bias = weight(out_features) if bias else None
        self.layout: int | None = None
        self.op: torch._ops.OpOverload | None = None
        self.input: QuantizedInput | None = None
        # Adds the updates of adapters to the output (`runtime/lora/slots.py`).
        self.adapters: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def hold(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Give the layer an uninitialised parameter on torch's default device."""
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def rows(self, part: str) -> slice:
        """Return the rows of a part in the weight and the bias."""
        names = list(self.parts)
        begin = sum(self.parts[name] for name in names[: names.index(part)])
        return slice(begin, begin + self.parts[part])

    def hold_rows(self, rows: Mapping[str, Stretch]) -> None:
        """Keep only these rows of each part. Call this before the weight is created."""
        self.held_rows = rows
        self.parts = {part: stretch.size for part, stretch in rows.items()}
        self.out_features = sum(self.parts.values())
        if self.bias is not None:
            self.bias = weight(self.out_features)

    def hold_columns(self, columns: Stretch) -> None:
        """Keep only these columns, so that the result is a summand. Call before weights are
        made.
        """
        self.held_columns = columns
        self.in_features = columns.size

    @property
    def is_split(self) -> bool:
        """Whether this is the part of a layer that one rank holds."""
        return self.held_columns is not None or bool(self.held_rows)

    @property
    def whole_in_features(self) -> int:
        """`in_features` of the layer before it was split."""
        return self.in_features if self.held_columns is None else self.held_columns.whole

    def bias_rows(self, part: str) -> Stretch | None:
        """Return the rows of the bias to load. If columns are split, only rank 0 loads it."""
        if self.held_columns is None or self.held_columns.begin == 0:
            return self.held_rows.get(part)
        size = self.parts[part]
        return Stretch(size, size, size)

    def pack(
        self,
        kernels: LinearKernels,
        kind: str,
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> None:
        """Replace the weight by `parts`, packed in the device's own layout (`LinearKernels`)."""
        layout = kernels.layout(kind, self.in_features)
        assert layout is not None
        if self.weight.is_meta:
            shape = kernels.packed_shape(kind, self.in_features, self.out_features)
            packed = torch.empty(shape, dtype=torch.uint8, device="meta")
        else:
            packed = kernels.pack(kind, parts, scales)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.layout = layout
        self.op = kernels.op if self.input is None else kernels.scaled_op

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return names and tensors of parameters that are neither a weight nor a bias."""
        return ()

    def usable(self, kernels: LinearKernels | None) -> LinearKernels | None:
        """Return `kernels` if they take a layer of this shape, else None."""
        return None if self.is_read_as_numbers else kernels

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, out] for x [T, in], by a packed weight. If `input` is set, it quantises x."""
        assert self.op is not None
        given = (x,) if self.input is None else self.input.quantize(x)
        result: torch.Tensor = self.op(
            *given, self.weight, self.bias, self.out_features, self.layout
        )
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.method.apply(self, x)
        return y if self.adapters is None else self.adapters(y, x)


class FusedLinear(Linear):
    """Several projections of one input as one multiplication. `parts`: rows by checkpoint name."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts


class Embedding(nn.Module):
    """Maps token ids [T] int64 to rows [T, hidden] of the weight [vocab, hidden].

    `kind` is None for numbers, or a format of GGUF whose blocks are packed for the device's
    kernels, like the weights of linear layers.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.held_rows: Stretch | None = None
        self.kind: str | None = None
        self.layout: int | None = None
        self.op: torch._ops.OpOverload | None = None
        self._stored: StoredTensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows that this rank holds."""
        return self.vocab_size if self.held_rows is None else self.held_rows.size

    def create(self, kind: str | None = None) -> None:
        """Give the layer an uninitialised weight with torch's default dtype and device."""
        self.kind = kind
        self.weight = weight(self.num_rows, self.hidden_size)
        if kind is not None:
            # `finish` sets the packed weight.
            self.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)

    def place(self) -> Place:
        """Return the place of the weight."""
        shape = self.num_rows, self.hidden_size

        def load(tensor: StoredTensor) -> None:
            if self.kind is None:
                tensor.copy_to(self.weight)
            else:
                self._stored = tensor

        return Place([shape], load, rows=Axis(0))

    def finish(self, kernels: LinearKernels | None, head: Linear | None) -> None:
        """Pack the weight if it has a `kind`. A tied output layer, `head`, shares the packed
        weight.
        """
        if self.kind is None:
            return
        assert kernels is not None
        self.layout, self.op = kernels.layout(self.kind, self.hidden_size), kernels.embedding_op
        if head is not None:
            self.weight = head.weight
            return
        shape = kernels.packed_shape(self.kind, self.hidden_size, self.num_rows)
        packed = torch.empty(shape, dtype=torch.uint8, device="meta")
        if not self.weight.is_meta:
            assert self._stored is not None and self._stored.blocks is not None
            packed = kernels.pack(self.kind, [self._stored.blocks()])
            self._stored = None
        self.weight = nn.Parameter(packed, requires_grad=False)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden] for rows [T] int64 of this rank."""
        if self.op is None:
            return F.embedding(rows, self.weight)
        shape = self.hidden_size, self.num_rows
        found: torch.Tensor = self.op(rows, self.weight, *shape, self.layout)
        return found

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(input_ids)
