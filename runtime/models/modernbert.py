"""ModernBERT (arXiv:2412.13663): an encoder with rotary positions, a gated feed-forward, and a
sliding window in most layers.

Shapes: T tokens, N texts, D head size. Source: the configuration and checkpoints of ModernBERT in
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels import ops
from ...kernels.attention import KVLayout
from ..config.encoder import EncoderConfig
from ..layers.activation import ACTIVATIONS
from ..layers.attention import attention
from ..layers.linear import Embedding, Linear, StoredTensor
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotation, plain_rotation
from .bert import encoder_layouts

ENCODER = "ModernBert"
MODEL_TYPE = "modernbert"
GGUF_ARCHITECTURE = "modern-bert"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETA_NAMES = {_GLOBAL: "global_rope_theta", _LOCAL: "local_rope_theta"}


class ModernBertLayer(nn.Module):
    """Attention and feed-forward, each on the normalised stream. The first layer's input is already
    normalised.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        size, extra = config.hidden_size, config.extra
        self.layer, self.head_dim = layer, config.head_dim
        biased, mlp_biased = extra["attention_bias"], extra["mlp_bias"]
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn = nn.ModuleDict(
            {"Wqkv": Linear(size, 3 * size, bias=biased), "Wo": Linear(size, size, bias=biased)}
        )
        self.mlp_norm = _norm(config)
        between = config.intermediate_size
        self.mlp = nn.ModuleDict(
            {
                "Wi": Linear(size, 2 * between, bias=mlp_biased),
                "Wo": Linear(between, size, bias=mlp_biased),
            }
        )
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads = self.attn["Wqkv"](self.attn_norm(x)).unflatten(-1, (-1, self.head_dim))
        third = heads.shape[1] // 3
        turned, v = heads.tensor_split([2 * third], dim=1)
        q, k = ops.rotary_embedding(turned, *rotation).tensor_split(2, dim=1)
        x = x + self.attn["Wo"](attention(q, k, v, self.layer))
        wide, gate = self.mlp["Wi"](self.mlp_norm(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.mlp["Wo"](self.activation(wide) * gate)
        return result


def _norm(config: EncoderConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.extra["norm_bias"])


class ModernBert(nn.Module):
    """See `Bert`. There is one text type."""

    base: ClassVar = "model."
    unused: ClassVar = ("decoder.", "head.")
    config_names: ClassVar[dict[str, str]] = {}
    gguf_names: ClassVar = {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "blk.{}.attn_norm": "layers.{}.attn_norm",
        "blk.{}.attn_qkv": "layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "layers.{}.attn.Wo",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_up": "layers.{}.mlp.Wi",
        "blk.{}.ffn_down": "layers.{}.mlp.Wo",
    }
    gguf_keys: ClassVar = {
        "attention.layer_norm_epsilon": "norm_eps",
        "attention.sliding_window": "local_attention",
        "attention.sliding_window_pattern": "global_attn_every_n_layers",
        "rope.freq_base": "global_rope_theta",
        "rope.freq_base_swa": "local_rope_theta",
        "hidden_activation": "hidden_activation",
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "layer_types": None,
        "rope_parameters": None,
        "rope_scaling": None,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "classifier_pooling": "cls",
        "classifier_bias": False,
        "classifier_activation": "gelu",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.classifier_pooling not in ("cls", "mean"):
            raise ValueError(
                f"classifier_pooling must be cls or mean, got {config.classifier_pooling!r:.60}; "
                "download the model again"
            )
        if config.classifier_activation not in ACTIVATIONS:
            raise ValueError(
                f"the activation {config.classifier_activation!r:.60} is not supported; "
                f"supported: {', '.join(ACTIVATIONS)}"
            )
        kinds = config.layer_types
        if kinds is None:
            every = config.global_attn_every_n_layers
            kinds = [_LOCAL if i % every else _GLOBAL for i in range(config.num_hidden_layers)]
        if len(kinds) != config.num_hidden_layers or not set(kinds) <= {_GLOBAL, _LOCAL}:
            raise ValueError(
                f"layer_types must say {_GLOBAL} or {_LOCAL} of each layer; "
                "download the model again"
            )
        # Older files have theta for each kind of layer, newer ones have it in `rope_parameters`.
        thetas = {}
        for kind in (_GLOBAL, _LOCAL):
            rope = (config.rope_parameters or {}).get(kind) or {}
            if config.rope_scaling or rope.get("rope_type", "default") != "default":
                raise ValueError(
                    "rope scaling is not supported for ModernBERT; choose another model"
                )
            theta = rope.get("rope_theta", getattr(config, _THETA_NAMES[kind]))
            if type(theta) not in (int, float) or theta <= 0:
                raise ValueError(
                    f"rope_theta must be more than 0, got {theta!r:.60}; choose another"
                )
            thetas[kind] = float(theta)
        names = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
        return {
            "norm_eps": float(config.norm_eps),
            "activation": config.hidden_activation,
            "extra": {
                **{name: bool(getattr(config, name)) for name in names},
                "kinds": list(kinds),
                "thetas": thetas,
                # A token sees half of the window on each side, and itself.
                "window": int(config.local_attention) // 2 + 1,
                "classifier_pooling": config.classifier_pooling,
                "classifier_activation": config.classifier_activation,
            },
        }

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, extra = config.hidden_size, config.extra
        self.config, self.tied_weights = config, dict[str, str]()
        self.embeddings = nn.ModuleDict(
            {"tok_embeddings": Embedding(config.vocab_size, size), "norm": _norm(config)}
        )
        self.layers = nn.ModuleList(
            ModernBertLayer(config, layer) for layer in range(config.num_layers)
        )
        self.final_norm = _norm(config)
        if config.num_labels:
            self.head = nn.ModuleDict(
                {
                    "dense": Linear(size, size, bias=extra["classifier_bias"]),
                    "norm": _norm(config),
                }
            )
            self.classifier = Linear(size, config.num_labels, bias=True)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        extra = self.config.extra
        x: torch.Tensor = self.embeddings["norm"](self.embeddings["tok_embeddings"](input_ids))
        rotations = {
            kind: plain_rotation(positions, self.config.head_dim, theta, x.dtype)
            for kind, theta in extra["thetas"].items()
        }
        for kind, layer in zip(extra["kinds"], self.layers, strict=True):
            x = layer(x, rotations[kind])
        result: torch.Tensor = self.final_norm(x)
        return result

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[self.config.extra["classifier_activation"]]
        hidden = self.head["norm"](activation(self.head["dense"](pooled)))
        logits: torch.Tensor = self.classifier(hidden)
        return logits

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return [tensor._replace(name=tensor.name.removeprefix(self.base)) for tensor in tensors]

    @property
    def classifier_pooling(self) -> str:
        return str(self.config.extra["classifier_pooling"])

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        extra = self.config.extra
        windows = [extra["window"] if kind == _LOCAL else None for kind in extra["kinds"]]
        return encoder_layouts(self.config, windows, dtype)
