"""ELECTRA (arXiv:2003.10555): BERT with embeddings that may be narrower than the layers, and
another classifier.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..config.encoder import EncoderConfig, check_whole
from ..layers.linear import Linear
from .bert import Bert
from .roberta import Roberta

ENCODER = "Electra"
MODEL_TYPE = "electra"


class Electra(Bert):
    """The classifier is that of RoBERTa."""

    base: ClassVar = "electra."
    unused: ClassVar = ("discriminator_predictions.", "generator_", *Bert.unused)
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = Bert.config_fields(config)
        check_whole(config, "embedding_size", least=1)
        return {
            **fields,
            "extra": {**fields["extra"], "embedding_size": config.embedding_size},
        }

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        width, size = config.extra["embedding_size"], config.hidden_size
        self.embeddings_project = Linear(width, size, bias=True) if width != size else None

    def embed(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        x = super().embed(input_ids, positions, type_ids)
        if self.embeddings_project is not None:
            x = self.embeddings_project(x)
        return x

    def make_classifier(self, config: EncoderConfig) -> None:
        Roberta.make_classifier(self, config)  # type: ignore[arg-type]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        head: Any = self.classifier
        logits: torch.Tensor = head["out_proj"](F.gelu(head["dense"](pooled)))
        return logits
