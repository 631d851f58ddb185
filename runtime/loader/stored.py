"""A tensor of a checkpoint that has not been read yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class StoredTensor(NamedTuple):
    """`name`: as Hugging Face checkpoints call it.

    `copy_to` writes the values into a contiguous tensor of the same shape and any dtype and device;
    it may be called from any thread, and raises `ValueError` where the file is broken.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    copy_to: Callable[[torch.Tensor], None]
    kind: str | None = None
    """The quantised format of GGUF that it is stored in, such as "Q4_1"; None for numbers."""
    blocks: Callable[[], torch.Tensor] | None = None
    """Gives a quantised one as it is stored: [rows, bytes] uint8."""
