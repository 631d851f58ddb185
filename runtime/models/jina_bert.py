"""Jina Embeddings v2 (arXiv:2310.19923): BERT with ALiBi in place of positions, and with a gated
feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..config.encoder import EncoderConfig
from ..layers.activation import ACTIVATIONS
from ..layers.distance_bias import alibi_slopes, distances, spread
from ..layers.linear import FusedLinear, StoredTensor
from .bert import Bert, BertLayer, bert_fields, encoder_layouts, renamed_parts

ENCODER = "JinaBert"
MODEL_TYPE = "bert"
GGUF_ARCHITECTURE = "jina-bert-v2"
_FEED_FORWARDS = {"geglu": "gelu", "reglu": "relu"}


class JinaBertLayer(BertLayer):
    """BERT's layer with gates, which lie before the values in the tensor."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        size, wide = config.hidden_size, config.intermediate_size
        parts = {"gates": wide, "values": wide}
        self.intermediate = nn.ModuleDict({"dense": FusedLinear(size, parts)})
        activation = ACTIVATIONS[config.activation]

        def gated(x: torch.Tensor) -> torch.Tensor:
            gates, values = x.chunk(2, dim=-1)
            return activation(gates) * values

        self.activation = gated


class JinaBert(Bert):
    """All layers share the ALiBi slopes."""

    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "max_position_embeddings": 8192,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }
    gguf_names: ClassVar = {
        **Bert.gguf_names,
        "blk.{}.ffn_gate": "encoder.layer.{}.intermediate.gates",
    }
    tensor_names: ClassVar = {
        "mlp.gated_layers": "intermediate.dense",
        "mlp.wo": "output.dense",
        "mlp.layernorm": "output.LayerNorm",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        said = config.position_embedding_type, config.feed_forward_type
        if said[0] != "alibi" or said[1] not in _FEED_FORWARDS:
            raise ValueError(
                f"position_embedding_type {said[0]!r:.60} with feed_forward_type {said[1]!r:.60} "
                f"is not supported; supported: alibi with {', '.join(_FEED_FORWARDS)}"
            )
        fields = bert_fields(config)
        activation = _FEED_FORWARDS[config.feed_forward_type]
        return {**fields, "activation": activation, "extra": {**fields["extra"], "positions": 0}}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.slopes = alibi_slopes(config.num_heads)

    def make_layers(self, config: EncoderConfig) -> list[nn.Module]:
        return [JinaBertLayer(config, layer) for layer in range(config.num_layers)]

    def bias(self, q: torch.Tensor, k: torch.Tensor, begin: int) -> torch.Tensor:
        """See `kernels.attention.Bias`."""
        far = distances(k.shape[2], k.device).abs()
        values = -self.slopes.to(k.device)[:, None] * far
        return spread(values.to(q.dtype), begin, q.shape[2])

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Gates and values are one tensor in a checkpoint, and one or two in a GGUF file."""
        placed = []
        wide = self.config.intermediate_size
        for tensor in renamed_parts(super().place_tensors(tensors), self.tensor_names):
            name, dot, _ = tensor.name.partition(".intermediate.dense.weight")
            if not dot or tensor.shape[0] != 2 * wide:
                name = tensor.name.replace(".intermediate.dense.", ".intermediate.values.")
                placed.append(tensor._replace(name=name))
                continue
            for part, begin in (("gates", 0), ("values", wide)):
                rows = tensor.part((slice(begin, begin + wide), slice(0, tensor.shape[1])))
                placed.append(rows._replace(name=f"{name}.intermediate.{part}.weight"))
        return placed

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        count = self.config.num_layers
        return encoder_layouts(self.config, [None] * count, dtype, biases=[self.bias] * count)
