"""Finds GGUF files with the vision tower of a text model, which llama.cpp names mmproj-*.gguf."""

from __future__ import annotations

from pathlib import Path

_MARK = "mmproj"


def is_mmproj(path: Path) -> bool:
    """Whether a file is a vision tower by its name."""
    return path.suffix == ".gguf" and _MARK in path.name.lower()


def mmproj_beside(model: Path) -> list[Path]:
    """Return the files beside a .gguf model that are vision towers by their names, sorted."""
    if is_mmproj(model):
        return []
    return sorted(path for path in model.absolute().parent.glob("*.gguf") if is_mmproj(path))
