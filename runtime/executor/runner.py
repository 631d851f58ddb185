"""What an engine core, or a drafter, calls on a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..core.request import Scheduled
from ..graphs.graph_runner import GraphCounts
from ..lora.store import AdapterStore
from ..multimodal.encodings import Encodings
from .step import PendingStep


class Runner(Protocol):
    """The part of `ModelRunner` that the core uses."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    adapters: AdapterStore | None
    images: Encodings | None

    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        """Launch a step. It takes its first tokens from `previous`, the step in flight."""
        ...

    def graph_counts(self) -> GraphCounts:
        """Count graph replays, padding and fallbacks of all steps so far."""
        ...

    def synchronize(self) -> None:
        """Wait for the device. Raise if the device is broken."""
        ...


class Listener(Protocol):
    """What a runner tells of each step."""

    def observe(self, scheduled: Sequence[Scheduled], hidden: torch.Tensor) -> None:
        """Take the hidden states [T, columns] of a step that is launched.

        `num_computed` of its requests is that before the step. The tensor is valid during the call.
        """
        ...
