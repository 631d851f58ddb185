"""A decoder whose last states are used instead of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..config.model import ModelConfig
from ..config.model_registry import model_class
from ..layers.linear import Linear, StoredTensor


class PooledDecoder(nn.Module):
    """A decoder without its output head, with the interface of `models.bert.Bert`.

    `content` is config.json. If its `is_causal` is false, or `use_bidirectional_attention` is true,
    a token also sees those after it. The latter halves windows: half lies on each side of a token.
    """

    unused: ClassVar = ("lm_head.", "decoder.lm_head.", "decoder.dense_")
    classifier_pooling: ClassVar = "lasttoken"

    def __init__(self, config: ModelConfig, num_labels: int, content: Mapping[str, Any]) -> None:
        super().__init__()
        self.config, self.tied_weights = config, dict[str, str]()
        self.decoder: Any = model_class(config.architecture)(config)
        del self.decoder.lm_head
        self.decoder.tied_weights = {}
        self.halves_windows = bool(content.get("use_bidirectional_attention"))
        self.causal = bool(content.get("is_causal", True)) and not self.halves_windows
        if num_labels:
            self.score = Linear(config.hidden_size, num_labels)

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Return tensors under the names of the modules.

        In checkpoints without an output head, names may lack `model.`.
        """
        whole = [
            tensor._replace(name=f"model.{tensor.name.removeprefix('model.')}")
            for tensor in tensors
            if not tensor.name.startswith(("score.", *self.unused))
        ]
        placed = self.decoder.checkpoint_tensors(self.config, whole)
        return [
            *(tensor._replace(name=f"decoder.{tensor.name}") for tensor in placed),
            *(tensor for tensor in tensors if tensor.name.startswith("score.")),
        ]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(input_ids, positions)
        return hidden

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.score(pooled)
        return logits

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        layouts = [replace(each, causal=self.causal) for each in self.decoder.kv_layouts(dtype)]
        if not self.halves_windows:
            return layouts
        return [
            each if each.window is None else replace(each, window=each.window // 2 + 1)
            for each in layouts
        ]
