"""ALBERT (arXiv:1909.11942): BERT with narrow embeddings and layers that share their weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..config.encoder import EncoderConfig, check_whole
from ..layers.linear import Linear, StoredTensor
from .bert import Bert, BertLayer, encoder_layouts, renamed_parts

ENCODER = "Albert"
MODEL_TYPE = "albert"
_MOST_IN_GROUP = 100


class Albert(Bert):
    """Each group of layers is computed several times before the next group."""

    base: ClassVar = "albert."
    unused: ClassVar = ("predictions.", "sop_classifier.", *Bert.unused)
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }
    tensor_names: ClassVar = {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.dense": "attention.output.dense",
        "attention.LayerNorm": "attention.output.LayerNorm",
        "ffn": "intermediate.dense",
        "ffn_output": "output.dense",
        "full_layer_layer_norm": "output.LayerNorm",
        "pooler": "pooler.dense",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        fields = Bert.config_fields(config)
        names = ("embedding_size", "num_hidden_groups", "inner_group_num")
        check_whole(config, *names, least=1)
        groups, inner = config.num_hidden_groups, config.inner_group_num
        if groups > config.num_hidden_layers or inner > _MOST_IN_GROUP:
            raise ValueError(
                f"num_hidden_groups must be at most num_hidden_layers, {config.num_hidden_layers}, "
                f"and inner_group_num at most {_MOST_IN_GROUP}, got {groups} and {inner}; download "
                "the model again"
            )
        own = {"embedding_size": config.embedding_size, "groups": groups, "inner": inner}
        return {**fields, "extra": {**fields["extra"], **own}}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        widened = Linear(config.extra["embedding_size"], config.hidden_size, bias=True)
        self.encoder["embedding_hidden_mapping_in"] = widened

    def make_layers(self, config: EncoderConfig) -> list[nn.Module]:
        count = config.extra["groups"] * config.extra["inner"]
        return [BertLayer(config, layer) for layer in range(count)]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        parts: Any = self.encoder
        extra, depth = self.config.extra, self.config.num_layers
        x = parts["embedding_hidden_mapping_in"](self.embed(input_ids, positions, type_ids))
        for number in range(depth):
            first = number * extra["groups"] // depth * extra["inner"]
            for layer in parts["layer"][first : first + extra["inner"]]:
                x = layer(x)
        result: torch.Tensor = x
        return result

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        def numbered(found: re.Match[str]) -> str:
            number = int(found[1]) * self.config.extra["inner"] + int(found[2])
            return f"encoder.layer.{number}."

        pattern = r"encoder\.albert_layer_groups\.(\d{1,5})\.albert_layers\.(\d{1,5})\."
        placed = renamed_parts(super().place_tensors(tensors), self.tensor_names)
        return [each._replace(name=re.sub(pattern, numbered, each.name)) for each in placed]

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        layers: Any = self.encoder["layer"]
        return encoder_layouts(self.config, [None] * len(layers), dtype)
