"""Helpers for `CausalLM.checkpoint_tensors`: convert tensors of a checkpoint to the names and
shapes of the modules, and check their shapes and dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch

from ..layers.linear import NUMBERS, Place, StoredTensor

# Tensors of AWQ and GPTQ whose second dimension lies along the rows of the weight.
_PACKED_IN_ROWS = ("qweight", "qzeros", "scales")
_WHOLE = ("g_idx", "input_scale", "weight_shape")  # Tensors that all parts of a fused layer share.


# For `renamed`: keeps the text model of a model of images and text.
TEXT_ALONE = {
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*": "",
    r"^(model\.)?image_newline$": "",
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
# The same for models of the Gemma family that also hear.
TEXT_ALONE_OF_GEMMA = {
    r"^(model\.)?(audio_tower|embed_vision|embed_audio)\..*": "",
    **TEXT_ALONE,
}


def renamed(tensors: Iterable[StoredTensor], names: Mapping[str, str]) -> list[StoredTensor]:
    """Return the tensors with names replaced by the first regular expression that matches.

    A tensor whose name becomes empty is left out.
    """
    found = []
    for tensor in tensors:
        name = tensor.name
        for pattern, replacement in names.items():
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        if name:
            found.append(tensor._replace(name=name))
    return found


def within_layers(tensors: Iterable[StoredTensor], layers: int) -> list[StoredTensor]:
    """Return the tensors without those of layers after the last one, which predict further
    tokens.
    """

    def is_within(name: str) -> bool:
        found = re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)
        return found is None or int(found[1]) < layers

    return [tensor for tensor in tensors if is_within(tensor.name)]


def unfused(
    tensors: Iterable[StoredTensor], fused: str, parts: Mapping[str, int]
) -> list[StoredTensor]:
    """Split the tensors of layers named `fused` into those of `parts`, which give their numbers of
    rows.

    `loader` reports sizes that do not fit.
    """
    found: list[StoredTensor] = []
    for tensor in tensors:
        path, _, kind = tensor.name.rpartition(".")
        owner, _, layer = path.rpartition(".")
        if layer != fused:
            found.append(tensor)
            continue
        found += _cut(tensor, f"{owner}.", kind, parts)
    return found


def _cut(
    tensor: StoredTensor, owner: str, kind: str, parts: Mapping[str, int]
) -> Iterable[StoredTensor]:
    dim, total, begin = 1 if kind in _PACKED_IN_ROWS else 0, sum(parts.values()), 0
    for part, rows in parts.items():
        name, size = f"{owner}{part}.{kind}", tensor.shape[dim] if len(tensor.shape) > dim else 0
        if kind in _WHOLE or size <= 1:
            yield tensor._replace(name=name)
            continue
        if rows * size % total:
            raise tensor.fault(f"of {size} rows cannot be cut into {', '.join(parts)}")
        end = begin + rows * size // total
        index = [slice(0, each) for each in tensor.shape]
        index[dim] = slice(begin, end)
        yield tensor.part(tuple(index))._replace(name=name)
        begin = end


def grouped_heads(
    tensors: Iterable[StoredTensor], fused: str, heads: int, kv_heads: int
) -> list[StoredTensor]:
    """Sort the rows of layers named `fused` for `unfused`: all queries, all keys, all values.

    Checkpoints of Falcon and Bloom hold the queries of a key/value head, its key and its value
    together.
    """
    each = heads // kv_heads + 2
    firsts = range(0, kv_heads * each, each)
    order = [first + number for first in firsts for number in range(each - 2)]
    order += [first + each - 2 for first in firsts] + [first + each - 1 for first in firsts]
    found = []
    for tensor in tensors:
        path, _, kind = tensor.name.rpartition(".")
        dim = 1 if kind in _PACKED_IN_ROWS else 0
        size = tensor.shape[dim] if len(tensor.shape) > dim else 0
        if path.rpartition(".")[2] == fused and kind not in _WHOLE and size > 1:
            if size % len(order):
                raise tensor.fault(f"of {size} rows cannot be cut into {len(order)} heads")
            tensor = reordered(tensor, dim, order, size // len(order))
        found.append(tensor)
    return found


def stacked(tensors: Iterable[StoredTensor], pattern: str, name: str) -> list[StoredTensor]:
    """Join tensors of one shape that a regular expression matches.

    Its last group is the index of a tensor along a new first dimension. `name` is the name of the
    result and may use the other groups.
    """
    found: list[StoredTensor] = []
    members: dict[str, dict[int, StoredTensor]] = {}
    for tensor in tensors:
        if one := re.fullmatch(pattern, tensor.name):
            members.setdefault(one.expand(name), {})[int(one[one.re.groups])] = tensor
        else:
            found.append(tensor)
    for whole, numbered in members.items():
        parts = [numbered[number] for number in sorted(numbered)]
        shape = (max(numbered) + 1, *parts[0].shape)
        for part in parts:
            if part.shape != shape[1:] or len(parts) != shape[0]:
                raise part.fault(f"is not one of {shape[0]} of one shape")

        def copy_to(target: torch.Tensor, parts: Sequence[StoredTensor] = parts) -> None:
            for part, row in zip(parts, target, strict=True):
                part.copy_to(row)

        found.append(parts[0]._replace(name=whole, shape=shape, copy_to=copy_to, cut=None))
    return found


def joined(tensors: Iterable[StoredTensor], name: str, parts: Sequence[str]) -> list[StoredTensor]:
    """Join the rows of the tensors of each layer that end with `parts` to one that ends with
    `name`.

    `loader` reports missing parts.
    """
    found: list[StoredTensor] = []
    owners: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        part = next((part for part in parts if tensor.name.endswith(f".{part}")), None)
        if part is None:
            found.append(tensor)
        else:
            owners.setdefault(tensor.name.removesuffix(part), {})[part] = tensor
    for owner, held in owners.items():
        in_order = [held[part] for part in parts if part in held]
        if held.keys() < set(parts):
            found += in_order
            continue
        rows = [part.shape[0] if part.shape else 1 for part in in_order]

        def copy_to(
            target: torch.Tensor, parts: list[StoredTensor] = in_order, rows: list[int] = rows
        ) -> None:
            for part, place in zip(parts, torch.split(target, rows), strict=True):
                part.copy_to(place)

        first = in_order[0]
        shape = (sum(rows), *first.shape[1:])
        found.append(StoredTensor(first.file, f"{owner}{name}", shape, copy_to))
    return found


def plus_one(tensors: Iterable[StoredTensor], is_norm: Callable[[str], bool]) -> list[StoredTensor]:
    """Add 1 to the weights of norms that multiply by the stored weight plus 1 (Gemma)."""
    return [
        changed(tensor, tensor.shape, lambda wide: wide + 1.0) if is_norm(tensor.name) else tensor
        for tensor in tensors
    ]


def changed(
    tensor: StoredTensor,
    shape: tuple[int, ...],
    change: Callable[[torch.Tensor], torch.Tensor] = lambda wide: wide,
) -> StoredTensor:
    """Return a tensor whose numbers are converted by `change` in float32. The shape may change, the
    size not.
    """

    def copy_to(target: torch.Tensor) -> None:
        wide = torch.empty(tensor.shape, dtype=torch.float32, device=target.device)
        tensor.copy_to(wide)
        target.copy_(change(wide).view(shape))

    return tensor._replace(shape=shape, copy_to=copy_to, cut=None, blocks=None)


def from_llama_cpp(
    tensors: Iterable[StoredTensor], mixer: str, *, decays: str = "A_log"
) -> list[StoredTensor]:
    """Undo the changes that llama.cpp's converter makes to recurrent layers named `mixer`.

    It stores -exp(A_log) for A_log, a bias of dt_proj for dt_bias, convolutions as [C, K], and some
    vectors in two dimensions. `decays` is "A" if the module keeps -exp(A_log) too.
    """
    owner = rf"model.layers.\1.{mixer}."
    names = {
        r"^blk\.(\d+)\.ssm_a$": f"{owner}{decays}",
        r"^blk\.(\d+)\.ssm_d$": f"{owner}D",
        r"\.dt_proj\.bias$": ".dt_bias",
    }
    found = []
    for tensor in renamed(tensors, names):
        _, _, own = tensor.name.partition(f".{mixer}.")
        size = prod(tensor.shape)
        if own == "A_log":
            found.append(changed(tensor, (size,), lambda wide: (-wide).log()))
        elif own in ("D", "norm.weight"):
            found.append(changed(tensor, (size,)))
        elif own in ("conv.weight", "conv1d.weight") and len(tensor.shape) == 2:
            found.append(changed(tensor, (tensor.shape[0], 1, tensor.shape[1])))
        else:
            found.append(tensor)
    return found


def check_fits(tensor: StoredTensor, place: Place) -> None:
    """Raise `ValueError` if the shape or dtype of a tensor does not fit its place."""
    if tensor.shape not in place.shapes:
        raise ValueError(
            f"{tensor.file}: the tensor {tensor.name} has shape {list(tensor.shape)}, but the "
            f"model's configuration asks for {list(place.shapes[0])}; download the model again"
        )
    if tensor.dtype not in place.dtypes:
        wanted = "numbers" if place.dtypes is NUMBERS else "/".join(map(_dtype_name, place.dtypes))
        raise ValueError(
            f"{tensor.file}: the tensor {tensor.name} is stored as {_dtype_name(tensor.dtype)}, "
            f"but the model's configuration asks for {wanted}; download the model again"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Most columns that formats of GGUF keep together. Large blocks are those of formats with _K in
# their name, or with names that begin with IQ or TQ.
_BLOCK, _NVFP4_BLOCK, _LARGE_BLOCK = 32, 64, 256


def reordered(
    tensor: StoredTensor, dim: int, units: Sequence[int], unit: int, *, skipped: int = 0
) -> StoredTensor:
    """Return the tensor with blocks of `unit` rows (`dim` 0) or columns (1) in another order.

    Block i of the result is block `units[i]`. The first `skipped` stay. Quantised tensors stay
    quantised if no block of their format is cut.
    """
    if list(units) == list(range(len(units))):
        return tensor
    moved = skipped + torch.tensor(units)[:, None] * unit + torch.arange(unit)
    order = torch.cat((torch.arange(skipped), moved.flatten()))
    if dim >= len(tensor.shape) or len(order) != tensor.shape[dim]:
        # `loader` reports sizes that do not fit.
        return tensor
    stored_blocks, kind = tensor.blocks, tensor.kind or ""
    block = _LARGE_BLOCK if "_K" in kind or kind.startswith(("IQ", "TQ")) else _BLOCK
    block = _NVFP4_BLOCK if kind == "NVFP4" else block
    if dim == 1 and (unit % block or skipped):
        stored_blocks = None

    def part(index: tuple[slice, ...]) -> StoredTensor:
        def copy_to(target: torch.Tensor) -> None:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            tensor.copy_to(whole)
            target.copy_(whole.index_select(dim, order)[index])

        def blocks() -> torch.Tensor:
            assert stored_blocks is not None
            stored = stored_blocks()
            rows, columns = len(stored), tensor.shape[1]
            if dim == 0:
                stored = stored[order]
            else:
                stored = stored.view(rows, len(units), -1)[:, torch.tensor(units)].flatten(1)
            begin, end = (
                each * stored.shape[1] // columns for each in (index[1].start, index[1].stop)
            )
            return stored[index[0], begin:end].contiguous()

        return tensor._replace(
            shape=tuple(each.stop - each.start for each in index),
            copy_to=copy_to,
            kind=tensor.kind if stored_blocks is not None else None,
            blocks=blocks if stored_blocks is not None else None,
            cut=part,
        )

    return part(tuple(slice(0, size) for size in tensor.shape))
