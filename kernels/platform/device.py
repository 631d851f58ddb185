"""The device that a process computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..attention import KVLayout


class Place(NamedTuple):
    """A process among the `size` ranks of an engine on this machine. `cpus` is the value of
    `--cpu-bind`.
    """

    rank: int = 0
    size: int = 1
    cpus: str = "auto"


ALONE = Place()


class Device:
    """A device, its dtypes and its queue of work.

    device.set_up(num_threads=None)
    x = torch.ones(8, device=device.device())
    device.synchronize()
    """

    device_type: str
    dispatch_key: str  # Where `torch.library` registers our ops.
    slot_dtype: torch.dtype = torch.int64  # For slot mappings and page numbers.
    default_dtype: torch.dtype = torch.bfloat16
    # dtypes that the device does not have. Weights in these are widened to 16 bits when loaded.
    lacking_dtypes: frozenset[torch.dtype] = frozenset()
    # dtypes that multiply more slowly than float32.
    slow_dtypes: frozenset[torch.dtype] = frozenset()

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def identity(self) -> str:
        """Return what compiled code depends on: the kind of device and its capabilities."""
        return self.device_type

    def set_up(self, num_threads: int | None, place: Place = ALONE) -> None:
        """Prepare this process of an engine, before anything is allocated. `num_threads` is the
        total of all ranks on this machine. Raise `ValueError` with a remedy.
        """

    def use_device(self, index: int) -> None:
        """Compute on the device with this index from now on."""

    def synchronize(self) -> None:
        """Wait until all launched work has run."""

    def remarks(self, layouts: Sequence[KVLayout] = ()) -> dict[str, str]:
        """Return lines for the start-up summary, by name: what is unexpected about this machine.
        `layouts` are those of the model's layers with our attention.
        """
        return {}
