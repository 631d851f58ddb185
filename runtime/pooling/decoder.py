"""A decoder that is asked for its last states instead of for a next token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..layers.linear import Linear
from ..model_config import ModelConfig
from ..models.registry import model_class


class PooledDecoder(nn.Module):
    """Any of our decoders without its output head, with the interface of `models.bert.Bert`."""

    unused: ClassVar = ("lm_head.",)
    classifier_pooling: ClassVar = "lasttoken"

    def __init__(self, config: ModelConfig, num_labels: int, *, causal: bool) -> None:
        super().__init__()
        self.config, self.tied_weights = config, dict[str, str]()
        self.decoder: Any = model_class(config.architecture)(config)
        del self.decoder.lm_head
        self.decoder.tied_weights = {}
        self.causal = causal
        if num_labels:
            self.score = Linear(config.hidden_size, num_labels)

    def place_name(self, name: str) -> str:
        """Where a checkpoint's tensor goes: those of a decoder alone have no `model.` before
        them.
        """
        if name.startswith(("score.", *self.unused)):
            return name
        return f"decoder.model.{name.removeprefix('model.')}"

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(input_ids, positions)
        return hidden

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.score(pooled)
        return logits

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        return [replace(each, causal=self.causal) for each in self.decoder.kv_layouts(dtype)]
