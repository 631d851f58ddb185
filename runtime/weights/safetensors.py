"""Tensors of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .stored import StoredTensor

_WHOLE = "model.safetensors"


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a folder. Raises `ValueError` where a file is missing, cut off or broken."""
    return [tensor for path in _shards(folder) for tensor in _tensors_of(path)]


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in _names_in(index)]
    # Some folders hold the same weights a second time under another name.
    files = [folder / _WHOLE] if (folder / _WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files; other weight formats are not read")
    return files


def _names_in(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is broken ({error}); fetch the model again") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {', '.join(missing[:3])}, which its index names; fetch the model again")
    return names


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    with _named_errors(path):
        # Stays open, mapped into memory, until the last of its tensors is forgotten.
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    for name, shape in shapes.items():
        yield StoredTensor(path, name, shape, partial(_copy, path, file.get_tensor, name))


def _copy(path: Path, get_tensor: Callable[[str], Any], name: str, target: torch.Tensor) -> None:
    with _named_errors(path):
        target.copy_(get_tensor(name))


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut off or broken ({error}); fetch it again") from None
