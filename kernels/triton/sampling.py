"""Filtered sampling on the device, without sorting the vocabulary and without waiting.

flashinfer and sgl-kernel draw by rejection from a varying number of their own random numbers. Here
a token is a function of one number, which is made from seed and position.
"""

from __future__ import annotations

import torch

from .sampling_kernel import sample_filtered_kernel

_ROOM = 4096  # Candidates of a row that are searched in one tile.


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    room: int = _ROOM,
    block: int = _ROOM,
) -> torch.Tensor:
    """Draw the same tokens as `kernels.reference.sample_filtered`.

    `room` is the number of candidates of a row. `block`, a power of two, is the number of elements
    in a tile.
    """
    rows, vocab = probs.shape
    assert probs.dtype == torch.float32 and probs.stride(1) == 1
    drawn = torch.empty(rows, dtype=torch.int64, device=probs.device)
    if rows:
        candidates = torch.empty(rows, room, dtype=torch.float32, device=probs.device)
        ids = torch.empty(rows, room, dtype=torch.int32, device=probs.device)
        sample_filtered_kernel[(rows,)](
            probs,
            candidates,
            ids,
            top_k,
            top_p,
            min_p,
            uniform,
            drawn,
            vocab,
            probs.stride(0),
            room,
            BLOCK=block,
            num_warps=16,
            maxnreg=128,  # All that 512 threads may have. With fewer, Triton 3.7 spills.
        )
    return drawn
