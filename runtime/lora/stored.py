"""An adapter's matrices as they lie in its files, before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..layers.linear import StoredTensor


class StoredUpdate(NamedTuple):
    """The update of one linear layer of a checkpoint.

    Attributes:
        name: The name of the layer in the checkpoint of the base model.
        a, b: [r, in] and [out, r].
        scale: The factor of the product.
    """

    name: str
    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class StoredAdapter(NamedTuple):
    """The updates of an adapter. `in_gguf`: names and orders of rows are those of GGUF files."""

    path: Path
    updates: list[StoredUpdate]
    in_gguf: bool = False
