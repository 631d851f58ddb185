"""The contract of a head that drafts tokens from the hidden states of the model which it belongs
to.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout


class DraftHead(nn.Module):
    """A layer that guesses the token after the next one.

    The row of position p combines the model's hidden state of p with the token at p + 1. It guesses
    the token at p + 2. For further tokens, its own state takes the place of the model's.

        state = head(ids, positions, head.combine(hidden))    # rows of known tokens
        logits = head.compute_logits(state)                   # [N, vocabulary]
        state = head(drafted, positions + 1, state)           # one more token

    The head keeps keys and values beside those of the model's layers, in the same pages.

    Attributes:
        tied_weights: None are tied. The loader reads it of every module that it fills.
        first_column: Where the columns that the head reads begin in the hidden states of a step.
    """

    tied_weights: ClassVar[dict[str, str]] = {}
    first_column = 0

    def number_layers(self, first: int) -> None:
        """Number the head's attention layers from `first` on, the number of the model's own."""
        for number, module in enumerate(self._keepers()):
            module.layer = first + number

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """Return what each attention layer of the head keeps of a token."""
        return [module.kv_layout(dtype) for module in self._keepers()]

    def _keepers(self) -> list[Any]:
        return [module for module in self.modules() if hasattr(module, "kv_layout")]

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states [T, hidden] that stand for the model's hidden states."""
        return hidden

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the states [T, hidden] of tokens input_ids [T], which follow states `hidden` of
        `positions`.
        """
        raise NotImplementedError

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] float32 of states [N, hidden], over the model's vocabulary."""
        raise NotImplementedError
