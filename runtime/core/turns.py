"""Positions by which a model rotates, where images take fewer positions than tokens (M-RoPE)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .request import Scheduled


def turns_of(
    scheduled: list[Scheduled], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Return `Batch.turns` of a step with these positions [T], or None if both are equal."""
    if all(request.turns is None for request, _ in scheduled):
        return None
    turns, row = positions.copy(), 0
    for request, num_new in scheduled:
        if request.turns is not None:
            own = positions[row : row + num_new]
            in_prompt = own < request.num_prompt
            known = request.turns[np.minimum(own, request.num_prompt - 1)]
            turns[row : row + num_new] = np.where(in_prompt, known, own + request.turn_shift)
        row += num_new
    return turns
