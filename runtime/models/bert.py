"""BERT (arXiv:1810.04805): an encoder with learned positions and two text types, and its
classifier.

Shapes: T tokens, N texts, H heads, D head size. Parameters have the names of encoder checkpoints,
except fused ones. The names of a classifier begin with `base`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import Bias, KVLayout
from ..config.encoder import EncoderConfig, check_whole
from ..layers.activation import ACTIVATIONS
from ..layers.attention import attention
from ..layers.linear import Embedding, FusedLinear, Linear, StoredTensor
from ..layers.norm import LayerNorm

ENCODER = "Bert"
MODEL_TYPE = "bert"
GGUF_ARCHITECTURE = "bert"


def _closing(in_features: int, config: EncoderConfig) -> nn.ModuleDict:
    """Return the end of a block: a projection whose result is added to the input and normalised."""
    size = config.hidden_size
    return nn.ModuleDict(
        {
            "dense": Linear(in_features, size, bias=True),
            "LayerNorm": LayerNorm(size, eps=config.norm_eps, bias=True),
        }
    )


class BertLayer(nn.Module):
    """Attention and feed-forward, each followed by a norm of its sum with its input."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.head_dim = layer, config.head_dim
        parts = dict.fromkeys(("query", "key", "value"), size)
        qkv = nn.ModuleDict({"qkv": FusedLinear(size, parts, bias=True)})
        self.attention = nn.ModuleDict({"self": qkv, "output": _closing(size, config)})
        self.intermediate = nn.ModuleDict(
            {"dense": Linear(size, config.intermediate_size, bias=True)}
        )
        self.output = _closing(config.intermediate_size, config)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.attention
        heads = inner["self"]["qkv"](x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.tensor_split(3, dim=1)
        seen = attention(q, k, v, self.layer)
        x = inner["output"]["LayerNorm"](inner["output"]["dense"](seen) + x)
        wide = self.activation(self.intermediate["dense"](x))
        result: torch.Tensor = self.output["LayerNorm"](self.output["dense"](wide) + x)
        return result


class Bert(nn.Module):
    """Maps token ids to hidden states. A classifier also maps the states to logits."""

    base: ClassVar = "bert."
    # Beginnings of names of tensors that a checkpoint may have and that are not read.
    unused: ClassVar[tuple[str, ...]] = ("cls.", "pooler.", "embeddings.position_ids")
    # Values of transformers' configuration for members that config.json leaves out.
    config_defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
    }
    # Names of members in config.json that differ from BERT's.
    config_names: ClassVar[dict[str, str]] = {}
    # Names in a checkpoint by names in GGUF files.
    gguf_names: ClassVar[dict[str, str]] = {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
        "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
        "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
        "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
        "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
        "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
        "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
        "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
        "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
    }
    # Metadata of GGUF files, without the name of the architecture, and their members of
    # config.json. Sizes that all files have are not listed.
    gguf_keys: ClassVar[dict[str, str]] = {"attention.layer_norm_epsilon": "layer_norm_eps"}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.position_embedding_type != "absolute":
            raise ValueError(
                f"position_embedding_type {config.position_embedding_type!r:.60} is not supported; "
                "choose another model"
            )
        return bert_fields(config)

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        extra = config.extra
        self.config, self.tied_weights = config, dict[str, str]()
        self.types, self.first_position = extra["types"], extra["first_position"]
        tables = {
            "word_embeddings": config.vocab_size,
            "position_embeddings": extra["positions"],
            "token_type_embeddings": extra["type_rows"],
        }
        width = extra["embedding_size"]
        self.embeddings = nn.ModuleDict(
            {name: Embedding(rows, width) for name, rows in tables.items() if rows}
        )
        self.embeddings["LayerNorm"] = LayerNorm(width, eps=config.norm_eps, bias=True)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(self.make_layers(config))})
        if config.num_labels:
            self.make_classifier(config)

    def make_layers(self, config: EncoderConfig) -> list[nn.Module]:
        return [BertLayer(config, layer) for layer in range(config.num_layers)]

    def make_classifier(self, config: EncoderConfig) -> None:
        size = config.hidden_size
        self.pooler = nn.ModuleDict({"dense": Linear(size, size, bias=True)})
        self.classifier: nn.Module = Linear(size, config.num_labels, bias=True)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden states [T, hidden] of input_ids, positions and type_ids [T] int64.

        A type id is 1 in the second text of a pair.
        """
        x = self.embed(input_ids, positions, type_ids)
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x)
        return x

    def embed(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the input of the first layer, [T, embedding size]."""
        parts: Any = self.embeddings
        x = parts["word_embeddings"](input_ids)
        if self.types:
            x = x + parts["token_type_embeddings"](type_ids.clamp(max=self.types - 1))
        if "position_embeddings" in parts:
            x = x + parts["position_embeddings"](positions + self.first_position)
        normed: torch.Tensor = parts["LayerNorm"](x)
        return normed

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits [N, labels] of pooled [N, hidden], the states of the first tokens."""
        logits: torch.Tensor = self.classifier(torch.tanh(self.pooler["dense"](pooled)))
        return logits

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Return the tensors of a checkpoint under the names of the modules.

        Names of classifiers begin with `base`. Old checkpoints have other names for norms.
        """
        found = []
        for tensor in tensors:
            name = tensor.name.removeprefix(self.base)
            for old, new in (("gamma", "weight"), ("beta", "bias")):
                name = re.sub(rf"LayerNorm\.{old}$", f"LayerNorm.{new}", name)
            found.append(tensor._replace(name=name))
        return found

    @property
    def classifier_pooling(self) -> str:
        """Which states a classifier reads: one of `pooling.folder`'s modes."""
        return "cls"

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """Return how each layer attends."""
        return encoder_layouts(self.config, [None] * self.config.num_layers, dtype)


def bert_fields(config: Any) -> dict[str, Any]:
    """Return `Bert.config_fields` of a model with any kind of positions."""
    check_whole(config, "type_vocab_size", least=0)
    return {
        "norm_eps": float(config.layer_norm_eps),
        "activation": config.hidden_act,
        "extra": {
            "positions": config.max_position_embeddings,
            "first_position": 0,
            "type_rows": config.type_vocab_size,
            "types": config.type_vocab_size,
            "embedding_size": config.hidden_size,
        },
    }


def encoder_layouts(
    config: EncoderConfig,
    windows: Sequence[int | None],
    dtype: torch.dtype,
    *,
    biases: Sequence[Bias | None] | None = None,
) -> list[KVLayout]:
    """Return a layout for each layer.

    With a sliding `window`, a token sees `window - 1` tokens on each side. `biases` are the biases
    of scores of each layer.
    """
    heads, size = config.num_heads, config.head_dim
    return [
        KVLayout(
            num_heads=heads,
            num_kv_heads=heads,
            key_size=size,
            value_size=size,
            scale=size**-0.5,
            dtype=dtype,
            window=window,
            causal=False,
            bias=bias,
        )
        for window, bias in zip(windows, biases or [None] * len(windows), strict=True)
    ]


def renamed_parts(tensors: Sequence[StoredTensor], names: Mapping[str, str]) -> list[StoredTensor]:
    """Replace the components of names of tensors, between dots, by `names`."""
    parts = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![^.])(?:{parts})(?![^.])")
    return [
        tensor._replace(name=pattern.sub(lambda found: names[found[0]], tensor.name))
        for tensor in tensors
    ]
