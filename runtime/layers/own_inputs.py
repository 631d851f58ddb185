"""A decoder whose layers have an input of their own beside the hidden states: rows of a second
table of embeddings, and a product of the first embeddings (Gemma 3n, Gemma 4).

Shapes: T tokens, P numbers of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config.model import ModelConfig
from .decoder import Decoder
from .linear import Embedding, Linear, rounded
from .norm import RMSNorm


class OwnInputDecoder(Decoder):
    """The second table, the product, and how both become the inputs of the layers.

    Attributes:
        rows: Number of rows of the second table.
        projection_scale, input_scale: Factors of the product, and of the sum of both parts.
    """

    projection_scale: float
    input_scale: float

    def add_own_inputs(self, config: ModelConfig, rows: int, width: int) -> None:
        """Create the modules for inputs of `width` numbers."""
        count = len(self.layers)
        self.rows, self.width = rows, width
        self.embed_tokens_per_layer = Embedding(rows, count * width)
        self.per_layer_model_projection = Linear(config.hidden_size, count * width)
        self.per_layer_projection_norm = RMSNorm(width, config.norm_eps)
        self.per_layer_scale = rounded(width**0.5)

    def own_inputs(self, x: torch.Tensor, ids: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the own input [T, P] of each layer for embeddings x [T, hidden] of ids [T]."""
        own = self.embed_tokens_per_layer(ids) * self.per_layer_scale
        projected = (self.per_layer_model_projection(x) * self.projection_scale).unflatten(
            -1, (-1, self.width)
        )
        both = self.per_layer_projection_norm(projected) + own.unflatten(-1, (-1, self.width))
        # Contiguous for each layer, so that layers are pieces of one kind.
        inputs: Sequence[torch.Tensor] = (
            (both * self.input_scale).transpose(0, 1).contiguous().unbind()
        )
        return inputs
