"""Which adapters (LoRA) the tokens of the current step use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepAdapters:
    """Tells layers which slots of adapters a step uses (`lora.slots`).

    Attributes:
        slots: [T or more] int32, at the same address in all steps.
        is_on: Whether layers add updates. A forward is traced with and without them.
        count: Number of slots.
    """

    def __init__(self, count: int, most_tokens: int, device: torch.device) -> None:
        self.count = count
        self.slots = torch.full((most_tokens,), -1, dtype=torch.int32, device=device)
        self.is_on = False
        self._used = 0

    @contextmanager
    def using(self, slots: torch.Tensor) -> Iterator[None]:
        """Let layers add the updates of `slots` [T] inside the block."""
        count = len(slots)
        self.slots[:count] = slots
        if count < self._used:
            # A graph may be replayed for more tokens than the step has.
            self.slots[count : self._used] = -1
        self._used, self.is_on = count, True
        try:
            yield
        finally:
            self.is_on = False

    def dummy_slots(self, num_tokens: int) -> torch.Tensor:
        """Return slots for made-up tokens: of all adapters, and of none."""
        return torch.arange(num_tokens, device=self.slots.device) % (self.count + 1) - 1
