"""DistilBERT (arXiv:1910.01108): BERT with fewer layers and one text type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..config.encoder import EncoderConfig
from ..layers.linear import Linear, StoredTensor
from .bert import Bert, renamed_parts

ENCODER = "DistilBert"
MODEL_TYPE = "distilbert"


class DistilBert(Bert):
    """Checkpoints have names of their own for the layers of BERT."""

    base: ClassVar = "distilbert."
    unused: ClassVar = ("vocab_", *Bert.unused)
    config_names: ClassVar = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    }
    config_defaults: ClassVar = {**Bert.config_defaults, "num_hidden_layers": 6}
    tensor_names: ClassVar = {
        "transformer.layer": "encoder.layer",
        "attention.q_lin": "attention.self.query",
        "attention.k_lin": "attention.self.key",
        "attention.v_lin": "attention.self.value",
        "attention.out_lin": "attention.output.dense",
        "sa_layer_norm": "attention.output.LayerNorm",
        "ffn.lin1": "intermediate.dense",
        "ffn.lin2": "output.dense",
        "output_layer_norm": "output.LayerNorm",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = Bert.config_fields(config)
        return {**fields, "extra": {**fields["extra"], "type_rows": 0, "types": 0}}

    def make_classifier(self, config: EncoderConfig) -> None:
        size = config.hidden_size
        self.pre_classifier = Linear(size, size, bias=True)
        self.classifier = Linear(size, config.num_labels, bias=True)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(torch.relu(self.pre_classifier(pooled)))
        return logits

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed_parts(super().place_tensors(tensors), self.tensor_names)
