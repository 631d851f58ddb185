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
    """

    def __init__(self, most_tokens: int, device: torch.device) -> None:
        self.slots = torch.full((most_tokens,), -1, dtype=torch.int32, device=device)
        self.is_on = False
        self._used = 0

    @contextmanager
    def using(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Let layers add the updates of `slots` [T] inside the block. None: of no adapter."""
        if slots is None:
            yield
            return
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
