"""The layer of a model that predicts one token more (multi-token prediction, arXiv:2412.19437)."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.linear import Linear
from .causal_lm import CausalLM
from .draft_head import DraftHead

# Tensors of the layer that are copies of the model's own.
SHARED = ("embed_tokens", "shared_head.head")


class NextLayer(DraftHead):
    """A layer like the model's last one, which reads a token's embedding beside a hidden state.

    Embedding, rotary tables and output head are the model's. Modules are named as in the
    checkpoints of DeepSeek and GLM, where the layer follows the last one of the model.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        config = model.config
        self.enorm: Any = model.make_norm()
        self.hnorm: Any = model.make_norm()
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        # Checkpoints in float8 keep it in 16 bits and do not say so.
        self.eh_proj.stays_in_16_bits = True
        self.layer: Any = model.make_layer(config.num_layers)
        self.norm: Any = model.make_norm()
        if model.next_layer_reads_sums:
            self.first_column = config.hidden_size
        # A tuple hides the model from this module's parameters.
        self._model = (model,)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        decoder: Any = self._model[0].model
        both = [self.enorm(decoder.embed(input_ids, positions)), self.hnorm(hidden)]
        x: torch.Tensor = self.eh_proj(torch.cat(both, dim=-1))
        rotations = [rotary(positions) for rotary in decoder.rotaries]
        x, residual = self.layer(x, None, rotations)
        state: torch.Tensor = self.norm.add(x, residual)[0]
        return state

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return self._model[0].compute_logits(state)
