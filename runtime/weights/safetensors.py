"""Tensors of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def shards(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises `ValueError` where there are none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is broken ({error}); fetch the model again") from None
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which its index names; fetch the model again")
    if not files:
        raise ValueError(f"{folder} has no .safetensors files; other weight formats are not read")
    return files


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, mapped from the file. Raises `ValueError` where the file is cut off or broken."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is cut off or broken ({error}); fetch it again") from None
