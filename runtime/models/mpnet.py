"""MPNet (arXiv:2004.09297): BERT with one text type and a bias of scores by distance.

Shapes: H heads, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...kernels.attention import KVLayout
from ..config.encoder import EncoderConfig, check_whole
from ..layers.distance_bias import bucket_numbers, distances, spread
from ..layers.linear import Embedding, StoredTensor
from .bert import Bert, encoder_layouts, renamed_parts
from .roberta import Roberta

ENCODER = "MPNet"
MODEL_TYPE = "mpnet"
# Buckets of biases, for any size of the table. Distances from the second number on share a bucket.
_BUCKETS, _FARTHEST = 32, 128


class MPNet(Roberta):
    """Positions and classifier are those of RoBERTa. All layers share one table of biases."""

    base: ClassVar = "mpnet."
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 30527,
        "relative_attention_num_buckets": 32,
        # config.json does not state where positions begin.
        "pad_token_id": 1,
    }
    tensor_names: ClassVar = {
        "attention.attn.q": "attention.self.query",
        "attention.attn.k": "attention.self.key",
        "attention.attn.v": "attention.self.value",
        "attention.attn.o": "attention.output.dense",
        "attention.LayerNorm": "attention.output.LayerNorm",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        check_whole(config, "relative_attention_num_buckets", least=_BUCKETS)
        config.pad_token_id = 1
        fields = Roberta.config_fields(config)
        buckets = config.relative_attention_num_buckets
        own = {"type_rows": 0, "types": 0, "buckets": buckets}
        return {**fields, "extra": {**fields["extra"], **own}}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        table = Embedding(config.extra["buckets"], config.num_heads)
        self.encoder["relative_attention_bias"] = table

    def bias(self, q: torch.Tensor, k: torch.Tensor, begin: int) -> torch.Tensor:
        """See `kernels.attention.Bias`."""
        numbers = bucket_numbers(distances(k.shape[2], k.device), _BUCKETS, _FARTHEST)
        return spread(self.encoder["relative_attention_bias"](numbers).T, begin, q.shape[2])

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed_parts(super().place_tensors(tensors), self.tensor_names)

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        count = self.config.num_layers
        return encoder_layouts(self.config, [None] * count, dtype, biases=[self.bias] * count)
