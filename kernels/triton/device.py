"""What kernels' tiles are chosen by: the properties of the device that runs them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

_ANY = 2**30  # Bytes: the interpreter has no limit.


class Properties(NamedTuple):
    """Attributes:
    capability: Compute capability (major, minor), (0, 0) without a GPU.
    processors: Multiprocessors.
    shared_memory: Bytes of shared memory that one block may have.
    """

    capability: tuple[int, int]
    processors: int
    shared_memory: int


@cache
def properties(device: torch.device) -> Properties:
    if device.type != "cuda" or not torch.cuda.is_available():
        return Properties((0, 0), 1, _ANY)
    found: Any = torch.cuda.get_device_properties(device)
    return Properties(
        (found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin
    )
