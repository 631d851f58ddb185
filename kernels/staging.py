"""Host numbers to the device: one copy for all of a step's, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes at which each array begins: what vector loads want, and the same for every step, so that no kernel is compiled anew."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor of its dtype and shape on `device`.

    On a GPU they travel together in page-locked memory, in the order of the current stream, and the host goes on at
    once; torch keeps that memory until the copy is done. Elsewhere each is handed over as it is.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    offsets, size = _layout(arrays)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _pack(arrays, offsets, staging)
    return _unpack(arrays, offsets, staging.to(device, non_blocking=True))


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


def _unpack(arrays: Sequence[np.ndarray], offsets: Sequence[int], packed: torch.Tensor) -> list[torch.Tensor]:
    tensors = []
    for array, offset in zip(arrays, offsets, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(packed[offset : offset + array.nbytes].view(dtype).view(array.shape))
    return tensors
