"""An adapter in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

INVALID, NOT_FOUND, DISABLED = "invalid_adapter", "adapter_not_found", "lora_disabled"


class AdapterFault(ValueError):
    """An adapter cannot be loaded or used, for a reason that the client can correct.

    `code` is one of `INVALID`, `NOT_FOUND` and `DISABLED`.
    """

    def __init__(self, reason: str, code: str = INVALID) -> None:
        super().__init__(reason)
        self.code = code


class Update(NamedTuple):
    """The update of one part of a linear layer: x [T, in] adds (x a^T) b * scale to its output.

    `a` [r, in] and `b` [r, out] are those of this rank.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Adapter(NamedTuple):
    """All updates of an adapter, by the name of the layer and of its part (`Linear.parts`).

    `identity` and `rank`: see `AdapterInfo`.
    """

    identity: str
    rank: int
    updates: dict[tuple[str, str], Update]

    @property
    def num_bytes(self) -> int:
        return sum(update.a.nbytes + update.b.nbytes for update in self.updates.values())
