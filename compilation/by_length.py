"""Two forwards of a model: for short steps, and for long steps with rows split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .piecewise import PiecewiseForward
from .recording import Recorder, Recording


class ForwardByLength:
    """Runs `long` from `tokens` tokens on, padded to a number that its plan supports.

    All ranks must use it, because the collectives of the two forwards differ.
    """

    def __init__(self, short: PiecewiseForward, long: PiecewiseForward, tokens: int) -> None:
        self.short, self.long = short, long
        self.tokens = long.plan.good_for(tokens)
        self.parts = (short, long)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        tokens = inputs[0].shape[0]
        if tokens < self.tokens:
            return self.short(*inputs)
        added = self.long.plan.good_for(tokens) - tokens
        if added:
            inputs = tuple(F.pad(tensor, (0, added)) for tensor in inputs)
        return self.long(*inputs)[:tokens]

    def recordable(self, size: int) -> int:
        """Return the largest size up to `size` that can be recorded."""
        return size if size < self.tokens else size - size % self.long.plan.unit

    def record(self, inputs: Sequence[torch.Tensor], recorder: Recorder) -> Recording:
        """Record the forward at a size that is `recordable`."""
        forward = self.short if inputs[0].shape[0] < self.tokens else self.long
        return forward.record(inputs, recorder)
