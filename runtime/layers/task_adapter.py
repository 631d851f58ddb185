"""Adapters of low rank (LoRA), one for each task of a checkpoint, added to the results of layers.

Shapes: T tokens, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .linear import Embedding, Linear, weight


class Task:
    """The task that a model computes. If `number` is None, no adapter is added."""

    number: int | None = None


class Adapter(nn.Module):
    """The adapters of a layer for all tasks.

    A linear layer has lora_A [tasks, R, in] and lora_B [tasks, out, R]. An embedding has lora_A
    [tasks, vocab, R] and lora_B [tasks, R, hidden].
    """

    def __init__(
        self, layer: Linear | Embedding, task: Task, *, tasks: int, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.task, self.scale = task, scale
        if isinstance(layer, Linear):
            self.lora_A = weight(tasks, rank, layer.in_features)
            self.lora_B = weight(tasks, layer.out_features, rank)
        else:
            self.lora_A = weight(tasks, layer.vocab_size, rank)
            self.lora_B = weight(tasks, rank, layer.hidden_size)
        layer.adapter = self
        layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, given: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        if (number := self.task.number) is None:
            return result
        (x,) = given
        first, second = self.lora_A[number], self.lora_B[number]
        added: torch.Tensor = (
            (x @ first.T) @ second.T if isinstance(layer, Linear) else first[x] @ second
        )
        return result + added * self.scale
