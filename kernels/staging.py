"""Copies between host and device without waiting: a step's numbers go to the device in one copy,
and its results come back with an event.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Bytes. Each array begins at a multiple, which vector loads need, and which is the same in every
# step, so that no kernel is compiled again.
_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return each array as a tensor of its dtype and shape on `device`.

    The arrays are copied through page-locked memory in the order of the current stream, and the
    host does not wait. torch keeps that memory until the copy is done. On a GPU all arrays are one
    copy. On the host the arrays are not copied.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        # Tensors of other devices record the dtype of their memory, so a view with another dtype is
        # wrong.
        return [
            torch.from_numpy(array).pin_memory().to(device, non_blocking=True) for array in arrays
        ]
    offsets, size = _layout(arrays)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _pack(arrays, offsets, staging)
    return _unpack(arrays, offsets, staging.to(device, non_blocking=True))


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Return whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


class HostCopy:
    """A copy of tensors of one device to the host, in the order of the current stream. The caller
    does not wait.
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
        """Return the tensors on the host, after all that was launched before the copy has run."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array in bytes, and the bytes of all."""
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
