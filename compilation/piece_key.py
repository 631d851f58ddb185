"""The keys of pieces: hashes of what a piece computes, without names and without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import fx

from .core.errors import TraceError
from .shapes import TensorSpec


def piece_key(graph: fx.Graph, inputs: Sequence[TensorSpec]) -> str:
    """Return the key of a piece: 64 hexadecimal digits, the same in every process.

    Two pieces have the same key if they apply the same ops in the same order to the same arguments
    and constants, and take tensors of the same shapes, strides and dtypes, with weights in the same
    places. Raise `TraceError` if an argument has no canonical text.
    """
    numbers: dict[fx.Node, int] = {}
    lines = [str(spec.to_json()) for spec in inputs]
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        target = "" if node.op in ("placeholder", "output") else _name(node.target)
        lines.append(
            f"{number} {node.op} {target} {_text(node.args, numbers)} {_text(node.kwargs, numbers)}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def op_names(nodes: Iterable[fx.Node]) -> list[str]:
    """Return short names of the ops of a piece, in order, for people."""
    names = [_name(node.target) for node in nodes if node.op.startswith("call")]
    short = [
        name.removeprefix("torch.ops.")
        if name.startswith("torch.ops.")
        else name.rpartition(".")[2]
        for name in names
    ]
    return [name for name in short if name not in ("getitem", "aten.sym_size.int")]


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target}"
    return f"{getattr(target, '__module__', None)}.{target.__qualname__}"


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    """Return a canonical text of arguments. Different values have different texts."""
    match value:
        case fx.Node():
            return f"%{numbers[value]}"
        case tuple() | list():
            return f"[{', '.join(_text(item, numbers) for item in value)}]"
        case dict():
            items = [f"{key!r}: {_text(value[key], numbers)}" for key in sorted(value)]
            return f"{{{', '.join(items)}}}"
        case slice():
            return f"slice({_text((value.start, value.stop, value.step), numbers)})"
        case None | bool() | int() | float() | complex() | str():
            return f"{type(value).__name__} {value!r}"
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case EllipsisType():
            return "..."
    raise TraceError(
        f"an op takes {value!r}, a {type(value).__name__}, which has no canonical text"
    )
