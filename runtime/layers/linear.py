"""Layers that are one weight matrix, and the contract of how such a weight is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import ops
from ...kernels.linear import LinearKernels


def weight(*shape: int) -> nn.Parameter:
    """Uninitialised, in torch's default dtype and device; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet. `name`: as Hugging Face's call it.

    `copy_to` writes the values into a contiguous tensor of the same shape and any dtype and device;
    it may be called from any thread, and raises `ValueError` where the file is broken.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[torch.Tensor], None]
    dtype: torch.dtype = torch.float32
    """What `copy_to` reads."""
    kind: str | None = None
    """The quantised format of GGUF that it is stored in, such as "Q4_1"; None for numbers."""
    blocks: Callable[[], torch.Tensor] | None = None
    """Gives a quantised one as it is stored: [rows, bytes] uint8."""
    cut: Callable[[tuple[slice, ...]], StoredTensor] | None = None
    """Gives a part, of which no more is read than it needs: a slice a dimension."""
    unpadded: StoredTensor | None = None
    """What the file has of it, where that is followed by zeros that no file has."""

    def part(self, index: tuple[slice, ...]) -> StoredTensor:
        """The numbers of a slice of each dimension."""
        if (cut := self.cut) is not None:

            def within(inner: tuple[slice, ...]) -> StoredTensor:
                """A part of the part."""
                both = zip(index, inner, strict=True)
                return cut(tuple(slice(a.start + b.start, a.start + b.stop) for a, b in both))

            return cut(index)._replace(name=self.name, cut=within)

        def copy_to(target: torch.Tensor) -> None:
            whole = torch.empty(self.shape, dtype=self.dtype, device=target.device)
            self.copy_to(whole)
            target.copy_(whole[index])

        shape = tuple(each.stop - each.start for each in index)
        return self._replace(shape=shape, copy_to=copy_to, blocks=None)

    def read(self) -> torch.Tensor:
        """A copy in the host's memory."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(values)
        return values

    def fault(self, text: str) -> ValueError:
        """To be raised where its numbers are wrong."""
        return ValueError(f"{self.file}: the tensor {self.name} {text}; fetch the model again")


NUMBERS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


class Axis(NamedTuple):
    """The dimension of a tensor that the rows, or the columns, of a weight lie along; `unit`: how
    many of them an entry is for.
    """

    dim: int
    unit: int = 1


class Stretch(NamedTuple):
    """`size` rows or columns of `whole`, from `begin` on; behind the last are zeros."""

    begin: int
    size: int
    whole: int


class CannotSplitError(ValueError):
    """Why a layer cannot be split over so many ranks, without a remedy."""


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes: which shapes and dtypes it may have, and what takes it.

    `load` may be called from any thread; of a model's tensors it gets the small ones first, so that
    scales are found wrong before weights are read. It raises `StoredTensor.fault`.

    `rows`, `columns`: what a rank that holds a part of the layer takes a part of. None: it takes
    the tensor whole.
    """

    shapes: Sequence[tuple[int, ...]]
    load: Callable[[StoredTensor], None]
    dtypes: Collection[torch.dtype] = NUMBERS
    is_optional: bool = False
    rows: Axis | None = None
    columns: Axis | None = None


class LinearMethod(Protocol):
    """How the weight of one linear layer is loaded, kept and multiplied by; each format of weights
    is a file of `quantization/`.

        method.create(layer)
        for part in layer.parts:
            for name, place in method.places(layer, part).items():
                place.load(stored[part, name])    # from several threads
        method.finish(layer, kernels)
        y = layer.method.apply(layer, x)

    What `apply` reads are parameters of the layer, whose shapes and dtypes follow from `kind` and
    the layer's sizes: graphs are traced on a model that was created and finished without `load`.
    """

    @property
    def kind(self) -> str:
        """Says all that distinguishes the method: `methods.make_method` makes it again."""
        ...

    def create(self, layer: Linear) -> None:
        """Give the layer a weight to load into, in torch's default dtype and device."""
        ...

    def places(self, layer: Linear, part: str) -> Mapping[str, Place]:
        """The tensors of a part of the layer, by the last part of their names: "weight",
        "weight_scale" and such. A bias is none of them.
        """
        ...

    def finish(self, layer: Linear, kernels: LinearKernels | None) -> None:
        """Bring the whole weight into the form that `apply` reads, packed where the device has
        kernels for that; it may give the layer another method. On the meta device only its shape.
        """
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] to [T, out], by ops that passes can find in a graph."""
        ...


class StoredMethod(LinearMethod, Protocol):
    """A method whose weights may also be wanted as numbers."""

    def widen(self, layer: Linear) -> torch.Tensor:
        """Instead of `finish`: the weight [out, in] float32."""
        ...


def part_name(prefix: str, part: str) -> str:
    """Return the checkpoint's name of a part of the layer `prefix`.

    The text behind a # in `part` names the section of one tensor that a rank holds; it is not part
    of the name.
    """
    part = part.partition("#")[0]
    return f"{prefix.rpartition('.')[0]}.{part}" if part else prefix


class QuantizedInput(nn.Module):
    """How a layer makes numbers of 8 bits of its x: by the scale [1] float32 that the checkpoint
    gives, or by one for each `group` columns of a row, found when it runs.
    """

    def __init__(self, dtype: torch.dtype, group: int, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.dtype, self.group = dtype, group
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, in] to numbers [T, in] and scales, [1] or [T, in / group] float32."""
        if self.scale is not None:
            return ops.quantize_static(x, self.scale, self.dtype), self.scale
        return ops.quantize_dynamic(x, self.group, self.dtype)


class Linear(nn.Module):
    """y = x W^T + b: x [T, in], weight [out, in], or in the form that `method` keeps it in.

    Of a layer that is split, `in_features`, `out_features` and `parts` are those of this rank.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter
    input_scale: nn.Parameter
    input_order: nn.Parameter
    method: LinearMethod
    is_read_as_numbers = False
    """Whether its owner reads the weight itself, which so is neither packed nor quantised."""

    stays_in_16_bits = False
    """Whether it chooses among others, and so is not quantised on load, nor by float8 checkpoints,
    which leave that unsaid.
    """

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

    def hold(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Give the layer a parameter, uninitialised and on torch's default device."""
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def rows(self, part: str) -> slice:
        """Where a part lies in the weight and the bias."""
        names = list(self.parts)
        begin = sum(self.parts[name] for name in names[: names.index(part)])
        return slice(begin, begin + self.parts[part])

    def hold_rows(self, rows: Mapping[str, Stretch]) -> None:
        """From now on the layer has these rows of each part: before its weight is created."""
        self.held_rows = rows
        self.parts = {part: stretch.size for part, stretch in rows.items()}
        self.out_features = sum(self.parts.values())
        if self.bias is not None:
            self.bias = weight(self.out_features)

    def hold_columns(self, columns: Stretch) -> None:
        """From now on the layer has these columns, and its result is a summand of the whole's:
        before its weight is created.
        """
        self.held_columns = columns
        self.in_features = columns.size

    @property
    def is_split(self) -> bool:
        """Whether it is a rank's part of a layer."""
        return self.held_columns is not None or bool(self.held_rows)

    @property
    def whole_in_features(self) -> int:
        """`in_features` of the layer that this is a part of."""
        return self.in_features if self.held_columns is None else self.held_columns.whole

    def bias_rows(self, part: str) -> Stretch | None:
        """Of the bias, which one of the summands alone has: the others' is 0."""
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
        """From now on the weight is that of `parts` in the device's own layout: see
        `LinearKernels`. On the meta device only its shape.
        """
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
        """Names and tensors that are neither a weight's nor a bias."""
        return ()

    def usable(self, kernels: LinearKernels | None) -> LinearKernels | None:
        """The kernels, where they take a layer of this shape."""
        return None if self.is_read_as_numbers else kernels

    def multiply_packed(self, x: torch.Tensor) -> torch.Tensor:
        """For methods whose `finish` has called `pack`: x [T, in] to [T, out], by way of `input`
        where the method has set that before.
        """
        assert self.op is not None
        given = (x,) if self.input is None else self.input.quantize(x)
        result: torch.Tensor = self.op(
            *given, self.weight, self.bias, self.out_features, self.layout
        )
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)


class FusedLinear(Linear):
    """Several projections of one input as one multiplication. `parts`: the checkpoint's names and
    rows, in order.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts


class Embedding(nn.Module):
    """Rows of weight [vocab, hidden] by token id: [T] int64 to [T, hidden].

    `kind`: None for numbers, or the format of GGUF whose blocks are packed for the device's own
    kernels, as those of linear layers are.
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
        """Those of this rank."""
        return self.vocab_size if self.held_rows is None else self.held_rows.size

    def create(self, kind: str | None = None) -> None:
        """Give the layer a weight to load into, in torch's default dtype and device."""
        self.kind = kind
        self.weight = weight(self.num_rows, self.hidden_size)
        if kind is not None:
            # The packed one comes whole, in `finish`.
            self.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)

    def place(self) -> Place:
        """Of its weight."""
        shape = self.num_rows, self.hidden_size

        def load(tensor: StoredTensor) -> None:
            if self.kind is None:
                tensor.copy_to(self.weight)
            else:
                self._stored = tensor

        return Place([shape], load, rows=Axis(0))

    def finish(self, kernels: LinearKernels | None, head: Linear | None) -> None:
        """Pack the weight, where it is to be. `head`: what is tied to it, of which it then has the
        rows.
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
        """rows [T] int64 of this rank's to [T, hidden]."""
        if self.op is None:
            return F.embedding(rows, self.weight)
        shape = self.hidden_size, self.num_rows
        found: torch.Tensor = self.op(rows, self.weight, *shape, self.layout)
        return found

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(input_ids)
