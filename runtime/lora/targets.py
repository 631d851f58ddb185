"""The linear layers that adapters may change, found by their names in checkpoints.

A checkpoint may hold the rows of a layer in another order, or several layers as one. The model's
own conversion of its checkpoint (`CausalLM.adapter_tensors`) is applied to the numbers of rows and
columns, which shows where each row of an adapter's matrices belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..layers.linear import Linear, StoredTensor, Stretch, part_name
from ..loader.gguf_names import checkpoint_name
from ..models.causal_lm import CausalLM
from ..quantization.methods import named_linears
from .adapter import AdapterFault, Update
from .stored import StoredUpdate

_HEAD = "lm_head"
_WEIGHT = ".weight"
_SHOWN = 8


class _Part(NamedTuple):
    """A part of a linear layer of the model."""

    prefix: str
    linear: Linear
    part: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns on all ranks together."""
        rows = self.linear.held_rows.get(self.part)
        whole = self.linear.parts[self.part] if rows is None else rows.whole
        return whole, self.linear.whole_in_features


class Target(NamedTuple):
    """A part that an update changes, and the numbers of its rows and columns in the checkpoint."""

    part: _Part
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def place(self) -> tuple[str, str]:
        """The names of the layer and of the part."""
        return self.part.prefix, self.part.part

    def update(self, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> Update:
        """Return the update of this rank from the checkpoint's a [r, in] and b [out, r]."""
        linear = self.part.linear
        own_a = _held(a[:, self.columns], linear.held_columns, 1)
        own_b = _held(b[self.rows], linear.held_rows.get(self.part.part), 0)
        return Update(own_a.to(dtype).contiguous(), own_b.to(dtype).t().contiguous(), scale)


class Targets:
    """The linear layers of a model, by the names of their parts in its checkpoints."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.layers = {
            prefix: linear for prefix, linear in named_linears(model) if may_change(prefix, linear)
        }
        self._parts = {
            part_name(prefix, part): _Part(prefix, linear, part)
            for prefix, linear in self.layers.items()
            for part in linear.parts
        }
        self._others = {prefix for prefix, _ in named_linears(model)} - self.layers.keys()

    def find(self, stored: StoredUpdate, *, in_gguf: bool) -> list[Target]:
        """Return the parts that an update changes. Its matrices are not read.

        Raise `AdapterFault` if the model has no such layer, or one of another shape.
        """
        shape = stored.b.shape[0], stored.a.shape[1]
        of_rows = self._converted(stored, shape, 0, in_gguf=in_gguf)
        of_columns = self._converted(stored, shape, 1, in_gguf=in_gguf)
        found = []
        for rows, columns in zip(of_rows, of_columns, strict=True):
            part = self._part(rows.name.removesuffix(_WEIGHT), stored.name)
            if rows.shape != part.shape or columns.shape != part.shape:
                raise AdapterFault(
                    f"the adapter changes {stored.name:.200} as a layer of {shape[0]} rows and "
                    f"{shape[1]} columns, but this model's has {part.shape[0]} and "
                    f"{part.shape[1]}: the adapter belongs to another model"
                )
            first_column, first_row = slice(0, 1), slice(0, 1)
            row_order = rows.part((slice(0, part.shape[0]), first_column)).read()
            column_order = columns.part((first_row, slice(0, part.shape[1]))).read()
            found.append(Target(part, row_order[:, 0].long(), column_order[0].long()))
        return found

    def _part(self, name: str, stored_name: str) -> _Part:
        if (part := self._parts.get(name)) is not None:
            return part
        if name in self._others or name.startswith(_HEAD) or ".experts." in name:
            raise AdapterFault(
                f"the adapter changes {stored_name:.200}; adapters may change projections of "
                "attention, mixers and feed-forward layers, not experts, routers, embeddings or "
                "the output head: train with other target_modules"
            )
        known = sorted({each.rpartition(".")[2] for each in self._parts})
        raise AdapterFault(
            f"the model has no layer {stored_name:.200}: the adapter belongs to another model; "
            f"this one has {', '.join(known[:_SHOWN])}"
        )

    def _converted(
        self, stored: StoredUpdate, shape: tuple[int, int], dim: int, *, in_gguf: bool
    ) -> Sequence[StoredTensor]:
        """Return the numbers of rows (`dim` 0) or columns as the model's weights."""
        model, config = self._model, self._model.config
        name = f"{stored.name}{_WEIGHT}"
        try:
            if in_gguf:
                heads = model.gguf_interleaves_heads and _turns(stored.name)
                numbers = _numbers(name, shape, dim, pairs=config.head_dim if heads else None)
                own = checkpoint_name(name, model.gguf_names)
                return model.gguf_tensors(config, [numbers._replace(name=own)])
            return model.adapter_tensors(config, [_numbers(name, shape, dim)])
        except ValueError as error:
            raise AdapterFault(
                f"{stored.name:.200} has another shape than in this model ({error}): the adapter "
                "belongs to another model"
            ) from None


def may_change(prefix: str, linear: Linear) -> bool:
    """Whether adapters may change a layer: it computes all tokens of a step by its weight."""
    is_inner = not prefix.startswith(_HEAD) and ".experts." not in prefix
    return is_inner and not linear.is_read_as_numbers and not linear.stays_in_16_bits


def _turns(name: str) -> bool:
    return name.startswith("blk.") and name.rpartition(".")[2] in ("attn_q", "attn_k")


def _numbers(
    name: str, shape: tuple[int, ...], dim: int, *, pairs: int | None = None
) -> StoredTensor:
    """Return a weight whose numbers are those of its rows or columns.

    `pairs`: rows of each head, if they are stored in pairs (2i, 2i + 1) (`loader.gguf`).
    """
    line = torch.arange(shape[dim], dtype=torch.float32)
    if pairs and dim == 0:
        line = line.view(-1, pairs // 2, 2).transpose(1, 2).reshape(-1)

    def part(index: tuple[slice, ...]) -> StoredTensor:
        own = line[index[dim]]

        def copy_to(target: torch.Tensor) -> None:
            target.copy_(own[:, None] if dim == 0 else own)

        sizes = tuple(len(range(size)[each]) for size, each in zip(shape, index, strict=True))
        return StoredTensor(Path("adapter"), name, sizes, copy_to, cut=part)

    return part((slice(None),) * len(shape))


def _held(whole: torch.Tensor, stretch: Stretch | None, dim: int) -> torch.Tensor:
    """Return the rows or columns of this rank. Zeros follow the last one."""
    if stretch is None:
        return whole
    begin = min(stretch.begin, whole.shape[dim])
    part = whole.narrow(dim, begin, min(stretch.size, whole.shape[dim] - begin))
    missing = stretch.size - part.shape[dim]
    padding = [0, missing] if dim == 1 else [0, 0, 0, missing]
    return torch.nn.functional.pad(part, padding) if missing else part
