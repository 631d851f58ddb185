"""RoBERTa (arXiv:1907.11692): BERT with other position numbers, one text type and another
classifier.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ..config.encoder import EncoderConfig, check_whole
from ..layers.linear import Linear
from .bert import Bert

ENCODER = "Roberta"
MODEL_TYPE = "roberta"


class Roberta(Bert):
    """Positions begin after the id of the padding token, so that a table of 514 holds 512.

    Both texts of a pair have the same type, for any size of the table of types.
    """

    base: ClassVar = "roberta."
    unused: ClassVar = ("lm_head.", *Bert.unused)
    config_defaults: ClassVar = {**Bert.config_defaults, "pad_token_id": 1}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = Bert.config_fields(config)
        check_whole(config, "pad_token_id", least=-1)
        first = config.pad_token_id + 1
        return {
            **fields,
            "max_length": config.max_position_embeddings - first,
            "extra": {**fields["extra"], "first_position": first, "types": 1},
        }

    def make_classifier(self, config: EncoderConfig) -> None:
        size = config.hidden_size
        self.classifier = nn.ModuleDict(
            {
                "dense": Linear(size, size, bias=True),
                "out_proj": Linear(size, config.num_labels, bias=True),
            }
        )

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        head: Any = self.classifier
        logits: torch.Tensor = head["out_proj"](torch.tanh(head["dense"](pooled)))
        return logits
