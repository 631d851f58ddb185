"""Between host and device without waiting: a step's numbers to the device in one copy, its results
back behind an event.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes at which each array begins: what vector loads want, and the same for every step, so that no
kernel is compiled anew.
"""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor of its dtype and shape on `device`.

    They travel in page-locked memory, in the order of the current stream, and the host goes on at
    once; torch keeps that memory until the copy is done. On a GPU it is one copy for all of them.
    On the host each is handed over as it is.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        # Other devices' tensors know the dtype of their memory, which a view as another one would
        # belie.
        return [
            torch.from_numpy(array).pin_memory().to(device, non_blocking=True) for array in arrays
        ]
    offsets, size = _layout(arrays)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _pack(arrays, offsets, staging)
    return _unpack(arrays, offsets, staging.to(device, non_blocking=True))


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the host may look at it without waiting for a device that runs beside it."""
    return tensor.device.type == "cpu"


class HostCopy:
    """Tensors of one device on their way to the host, in the order of the current stream; who made
    it goes on at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event = None
        self._tensors = list(tensors)
        if tensors and tensors[0].device.type != "cpu":
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._event = torch.get_device_module(tensors[0].device).Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once all that was launched before the copy has run."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array begins, in bytes, and how many all of them take."""
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _pack(arrays: Sequence[np.ndarray], offsets: Sequence[int], staging: torch.Tensor) -> None:
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def _unpack(
    arrays: Sequence[np.ndarray], offsets: Sequence[int], packed: torch.Tensor
) -> list[torch.Tensor]:
    tensors = []
    for array, offset in zip(arrays, offsets, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(packed[offset : offset + array.nbytes].view(dtype).view(array.shape))
    return tensors
