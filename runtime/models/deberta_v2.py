"""DeBERTa v2 and v3 (arXiv:2006.03654, arXiv:2111.09543): BERT with scores that also compare the
content of one token with the relative position of the other.

Shapes: H heads, D head size, L tokens of a sequence, B queries, S rows of the table for each
direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import Bias, KVLayout
from ..config.encoder import EncoderConfig, check_whole
from ..layers.activation import ACTIVATIONS
from ..layers.distance_bias import distances, spread
from ..layers.linear import Embedding, Linear, StoredTensor
from ..layers.norm import LayerNorm
from .bert import Bert, BertLayer, bert_fields, encoder_layouts, renamed_parts

ENCODER = "DebertaV2"
MODEL_TYPE = "deberta-v2"
_KINDS = ("c2p", "p2c")


class DebertaLayer(BertLayer):
    """BERT's layer with a bias of its scores.

    The bias is the product of each query with the key of a distance (c2p), plus the product of each
    key with the query of a distance (p2c). `set_table` computes the keys and queries of distances,
    by the projections of tokens or by separate ones.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        extra, size = config.extra, config.hidden_size
        self.kinds, self.is_shared = extra["kinds"], extra["shares"]
        self.span, self.scale = extra["span"], extra["scale"]
        self.buckets, self.farthest = extra["buckets"], extra["farthest"]
        self.keys: torch.Tensor | None = None
        self.queries: torch.Tensor | None = None
        if not self.is_shared:
            inner: Any = self.attention
            for kind, name in zip(_KINDS, ("pos_key_proj", "pos_query_proj"), strict=True):
                if kind in self.kinds:
                    inner["self"][name] = Linear(size, size, bias=True)

    def set_table(self, table: torch.Tensor) -> None:
        """Set the table [2 S, hidden] of the embeddings of distances."""
        inner: Any = self.attention
        parts = inner["self"]
        if self.is_shared:
            queries, keys, _ = parts["qkv"](table).chunk(3, dim=-1)
        else:
            keys = parts["pos_key_proj"](table) if "c2p" in self.kinds else None
            queries = parts["pos_query_proj"](table) if "p2c" in self.kinds else None
        if "c2p" in self.kinds:
            self.keys = keys.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0).contiguous()
        if "p2c" in self.kinds:
            self.queries = queries.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0).contiguous()

    def bias(self, q: torch.Tensor, k: torch.Tensor, begin: int) -> torch.Tensor:
        """See `kernels.attention.Bias`."""
        behind = -distances(k.shape[2], k.device)
        if self.buckets > 0:
            behind = log_buckets(behind, self.buckets, self.farthest)
        rows = (behind + self.span).clamp(0, 2 * self.span - 1)
        numbers = spread(rows[None], begin, q.shape[2])
        scores = q.new_zeros(())
        if self.keys is not None:
            index = numbers.expand(*q.shape[:2], -1, -1)
            scores = scores + (q @ self.keys).gather(-1, index)
        if self.queries is not None:
            index = numbers.transpose(-1, -2).expand(*k.shape[:2], -1, -1)
            scores = scores + (k @ self.queries).gather(-1, index).transpose(-1, -2)
        scaled: torch.Tensor = scores * self.scale
        return scaled


def log_buckets(places: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """Return the buckets of distances.

    Distances up to half of `buckets` have a bucket each. Larger ones share buckets by their
    logarithm, up to `buckets` for `farthest`.
    """
    half = buckets // 2
    far = places.abs().clamp(min=half)
    share = torch.log(far / half) / torch.log(torch.tensor((farthest - 1) / half))
    grown = torch.ceil(share * (half - 1)).long() + half
    return torch.where(places.abs() <= half, places, grown * places.sign())


class DebertaV2(Bert):
    """All layers share one table of distances."""

    base: ClassVar = "deberta."
    unused: ClassVar = (
        "lm_predictions.",
        "mask_predictions.",
        "embeddings.position_embeddings.",
        *Bert.unused,
    )
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "relative_attention": False,
        "max_relative_positions": -1,
        "position_buckets": -1,
        "position_biased_input": True,
        "pos_att_type": None,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "conv_kernel_size": 0,
        "embedding_size": None,
        "attention_head_size": None,
        "pooler_hidden_size": None,
        "pooler_hidden_act": "gelu",
    }
    tensor_names: ClassVar = {
        "attention.self.query_proj": "attention.self.query",
        "attention.self.key_proj": "attention.self.key",
        "attention.self.value_proj": "attention.self.value",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.conv_kernel_size:
            raise ValueError(
                "conv_kernel_size: layers with a convolution (DeBERTa v2 xlarge and xxlarge) are "
                "not supported; choose a DeBERTa v3"
            )
        size = config.hidden_size
        head_dim = max(1, size // max(1, config.num_attention_heads))
        usual = {
            "embedding_size": size,
            "pooler_hidden_size": size,
            "attention_head_size": head_dim,
        }
        for name, value in usual.items():
            if (said := getattr(config, name)) not in (None, value):
                raise ValueError(
                    f"{name} is {said!r:.60}, but only {value} is supported; choose another model"
                )
        if config.pooler_hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"pooler_hidden_act {config.pooler_hidden_act!r:.60} is not supported; supported: "
                f"{', '.join(ACTIVATIONS)}"
            )
        check_whole(config, "max_relative_positions", "position_buckets")
        farthest = config.max_relative_positions
        farthest = farthest if farthest > 0 else config.max_position_embeddings
        buckets = config.position_buckets
        if buckets > 0 and (buckets < 4 or farthest - 1 <= buckets // 2):
            raise ValueError(
                f"position_buckets must be at least 4, and half of it less than {farthest - 1}, "
                f"got {buckets}; download the model again"
            )
        said = config.pos_att_type or []
        said = said.lower().split("|") if isinstance(said, str) else said
        kinds = [kind for kind in _KINDS if kind in {str(each).strip() for each in said}]
        fields = bert_fields(config)
        own = {
            "positions": config.max_position_embeddings if config.position_biased_input else 0,
            "kinds": kinds,
            "relative": bool(config.relative_attention),
            "shares": bool(config.share_att_key),
            "normed": "layer_norm" in str(config.norm_rel_ebd).lower(),
            "span": buckets if buckets > 0 else farthest,
            "buckets": buckets,
            "farthest": farthest,
            "scale": (head_dim * (1 + len(kinds))) ** -0.5,
            "pooler_activation": config.pooler_hidden_act,
        }
        return {**fields, "extra": {**fields["extra"], **own}}

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        extra, size = config.extra, config.hidden_size
        self.has_table = False
        if extra["relative"]:
            self.encoder["rel_embeddings"] = Embedding(2 * extra["span"], size)
        if extra["normed"]:
            self.encoder["LayerNorm"] = LayerNorm(size, eps=config.norm_eps, bias=True)

    def make_layers(self, config: EncoderConfig) -> list[nn.Module]:
        kind = DebertaLayer if config.extra["relative"] else BertLayer
        return [kind(config, layer) for layer in range(config.num_layers)]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        if self.config.extra["relative"] and not self.has_table:
            parts: Any = self.encoder
            table = parts["rel_embeddings"].weight
            table = parts["LayerNorm"](table) if self.config.extra["normed"] else table
            for layer in parts["layer"]:
                layer.set_table(table)
            self.has_table = True
        return super().forward(input_ids, positions, type_ids)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[self.config.extra["pooler_activation"]]
        logits: torch.Tensor = self.classifier(activation(self.pooler["dense"](pooled)))
        return logits

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed_parts(super().place_tensors(tensors), self.tensor_names)

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        count, extra = self.config.num_layers, self.config.extra
        layers: Any = self.encoder["layer"]
        biases: list[Bias | None] = [
            layer.bias if extra["relative"] and extra["kinds"] else None for layer in layers
        ]
        layouts = encoder_layouts(self.config, [None] * count, dtype, biases=biases)
        return [replace(each, scale=extra["scale"]) for each in layouts]
