"""The part of a checkpoint's tensors that a rank holds. Other parts are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from ..layers.linear import Axis, CannotSplitError, Place, StoredTensor, Stretch


def whole_place(place: Place, rows: Stretch | None, columns: Stretch | None) -> Place:
    """Return the place of a whole tensor, of which `place` takes the rows and columns of a rank.

    None stands for all rows or all columns. Raises `CannotSplitError` if they would cut an entry.
    """
    held: dict[int, Stretch] = {}
    for axis, stretch, name in ((place.rows, rows, "rows"), (place.columns, columns, "columns")):
        if axis is None or stretch is None:
            continue
        begin, size, whole = stretch
        if begin % axis.unit or size % axis.unit:
            raise CannotSplitError(
                f"{size} of {whole} {name} for each rank would cut a block of {axis.unit}"
            )
        held[axis.dim] = Stretch(begin // axis.unit, size // axis.unit, -(-whole // axis.unit))
    if not held:
        return place
    shapes = [
        tuple(held[dim].whole if dim in held else size for dim, size in enumerate(shape))
        for shape in place.shapes
    ]
    return place._replace(
        shapes=shapes,
        load=lambda tensor: place.load(narrowed(tensor, held)),
        rows=None,
        columns=None,
    )


def copy_of(target: torch.Tensor, rows: Stretch | None = None) -> Place:
    """Return the place of numbers that are kept as they are."""
    place = Place([tuple(target.shape)], lambda tensor: tensor.copy_to(target), rows=Axis(0))
    return whole_place(place, rows, None)


def copies_of(target: torch.Tensor, rows: Stretch | Sequence[Stretch] | None) -> list[Place]:
    """Return the places of `target`.

    `rows` is one stretch of the whole tensor, or several that lie one after another in `target`.
    """
    if rows is None or isinstance(rows, Stretch):
        return [copy_of(target, rows)]
    begins = [0, *accumulate(stretch.size for stretch in rows)]
    return [
        copy_of(target[begin : begin + stretch.size], stretch)
        for begin, stretch in zip(begins, rows, strict=False)
    ]


def narrowed(tensor: StoredTensor, held: Mapping[int, Stretch]) -> StoredTensor:
    """Return the given stretches of some dimensions of a tensor."""
    wanted = [held.get(dim, Stretch(0, size, size)) for dim, size in enumerate(tensor.shape)]
    part = tensor.part(
        tuple(slice(min(begin, whole), min(begin + size, whole)) for begin, size, whole in wanted)
    )
    shape = tuple(stretch.size for stretch in wanted)
    return part if part.shape == shape else _padded(part, shape)


def _padded(part: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Return the part, followed by zeros up to `shape`."""
    inside = tuple(slice(size) for size in part.shape)

    def copy_to(target: torch.Tensor) -> None:
        values = torch.empty(part.shape, dtype=target.dtype, device=target.device)
        part.copy_to(values)
        target.zero_()[inside] = values

    def blocks() -> torch.Tensor:
        assert part.blocks is not None
        stored = part.blocks()
        rows, num_bytes = stored.shape
        padded = stored.new_zeros(shape[0], num_bytes * shape[1] // part.shape[1])
        padded[:rows, :num_bytes] = stored
        return padded

    return part._replace(
        shape=shape,
        copy_to=copy_to,
        blocks=None if part.blocks is None else blocks,
        cut=None,
        unpadded=part,
    )
