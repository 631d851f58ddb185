"""Nomic BERT (arXiv:2402.01613): BERT with rotary positions and a gated feed-forward, or with
mixtures of experts in every other layer (arXiv:2502.07972).

Shapes: T tokens, D head size, E experts, I their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels import ops
from ..config.encoder import EncoderConfig, check_whole
from ..config.rope import number
from ..layers.activation import ACTIVATIONS
from ..layers.attention import attention
from ..layers.linear import FusedLinear, Linear, StoredTensor, weight
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotation, plain_rotation
from .bert import Bert, bert_fields, renamed_parts

ENCODER = "NomicBert"
MODEL_TYPE = "nomic_bert"
GGUF_ARCHITECTURE = "nomic-bert"
_GATED = {"swiglu": "silu", "geglu": "gelu"}
_MOST_EXPERTS = 1024


class Experts(nn.Module):
    """A mixture of experts whose weights are two matrices [E * I, hidden]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, extra = config.hidden_size, config.extra
        self.count, self.chosen, self.normalizes = extra["experts"]
        self.router = Linear(size, self.count)
        self.w1 = weight(self.count * config.intermediate_size, size)
        self.w2 = weight(self.count * config.intermediate_size, size)
        self.bias = weight(size)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, numbers = self.router(x).softmax(-1, dtype=torch.float32).topk(self.chosen)
        if self.normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        result = self.bias.expand_as(x).clone()
        pairs = zip(self.w1.chunk(self.count), self.w2.chunk(self.count), strict=True)
        for expert, (up, down) in enumerate(pairs):
            rows, places = (numbers == expert).nonzero(as_tuple=True)
            found = self.activation(x[rows] @ up.T) @ down
            result.index_add_(0, rows, found * shares[rows, places, None].to(x.dtype))
        return result


class RotaryLayer(nn.Module):
    """Attention and feed-forward, each followed by a norm of its sum with its input."""

    def __init__(self, config: EncoderConfig, layer: int, mlp: nn.Module) -> None:
        super().__init__()
        size, biased = config.hidden_size, config.extra["attention_bias"]
        self.layer, self.head_dim = layer, config.head_dim
        self.qkv = Linear(size, 3 * size, bias=biased)
        self.out = Linear(size, size, bias=biased)
        self.attn_norm = LayerNorm(size, eps=config.norm_eps, bias=True)
        self.mlp = mlp
        self.mlp_norm = LayerNorm(size, eps=config.norm_eps, bias=True)

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        turned, v = heads.tensor_split([2 * heads.shape[1] // 3], dim=1)
        if rotation is not None:
            turned = ops.rotary_embedding(turned, *rotation)
        q, k = turned.tensor_split(2, dim=1)
        x = self.attn_norm(x + self.out(attention(q, k, v, self.layer)))
        result: torch.Tensor = self.mlp_norm(x + self.mlp(x))
        return result


class Mlp(nn.Module):
    """A feed-forward with or without gates. `up` gives values, then gates."""

    def __init__(self, up: nn.Module, down: nn.Module, config: EncoderConfig) -> None:
        super().__init__()
        self.up, self.down, self.gated = up, down, config.extra["gated"]
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        if self.gated:
            values, gates = wide.chunk(2, dim=-1)
            wide = self.activation(gates) * values
        else:
            wide = self.activation(wide)
        result: torch.Tensor = self.down(wide)
        return result


class NomicBert(Bert):
    """config.json names sizes as GPT-2 or as transformers does."""

    base: ClassVar = "nomic_bert."
    other_base: ClassVar = "bert."  # Beginning of tensor names of old classifiers.
    config_names: ClassVar = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "attention_bias": "qkv_proj_bias",
        "mlp_bias": "mlp_fc1_bias",
        "rope_theta": "rotary_emb_base",
    }
    config_defaults: ClassVar = {
        **Bert.config_defaults,
        "vocab_size": 30528,
        "hidden_act": "swiglu",
        "max_position_embeddings": 2048,
        "rope_theta": 1000.0,
        "rope_parameters": None,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "causal": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "max_trained_positions": None,
        "moe_every_n_layers": 0,
        "num_experts": 0,
        "moe_top_k": 1,
        "moe_normalize_expert_weights": False,
    }
    gguf_names: ClassVar = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "blk.{}.attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "encoder.layers.{}.attn.out_proj",
        "blk.{}.attn_output_norm": "encoder.layers.{}.norm1",
        "blk.{}.ffn_up": "encoder.layers.{}.mlp.fc11",
        "blk.{}.ffn_gate": "encoder.layers.{}.mlp.fc12",
        "blk.{}.ffn_down": "encoder.layers.{}.mlp.fc2",
        "blk.{}.layer_output_norm": "encoder.layers.{}.norm2",
    }
    gguf_keys: ClassVar = {**Bert.gguf_keys, "rope.freq_base": "rope_theta"}
    # The only supported values of members of config.json.
    only: ClassVar[dict[str, Any]] = {
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "causal": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
    }
    tensor_names: ClassVar = {
        "encoder.layers": "encoder.layer",
        "emb_ln": "embeddings.LayerNorm",
        "attn.Wqkv": "qkv",
        "attn.out_proj": "out",
        "norm1": "attn_norm",
        "norm2": "mlp_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
        "mlp.router.layer": "mlp.router",
        "mlp.experts.mlp.w1": "mlp.w1",
        "mlp.experts.mlp.w2": "mlp.w2",
        "mlp.experts.bias": "mlp.bias",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        check_only(config, NomicBert.only)
        if config.mlp_bias != config.mlp_fc2_bias:
            raise ValueError("mlp_fc1_bias and mlp_fc2_bias differ; choose another model")
        every, count, top = config.moe_every_n_layers or 0, config.num_experts, config.moe_top_k
        if every:
            check_whole(config, "moe_every_n_layers", "num_experts", "moe_top_k", least=1)
            if not top <= count <= _MOST_EXPERTS:
                raise ValueError(
                    f"num_experts must be at most {_MOST_EXPERTS} and at least moe_top_k, {top}, "
                    f"got {count}; download the model again"
                )
        # transformers' config.json names the activation of gates, which all its models have.
        gated = config.hidden_act in _GATED or not hasattr(config, "activation_function")
        fields = rotary_fields(config, *plain_rope(config), gated=gated)
        experts = count, top, bool(config.moe_normalize_expert_weights)
        fields["extra"] |= {"every": every, "experts": experts}
        longest = config.max_position_embeddings
        return {**fields, "max_length": min(longest, config.max_trained_positions or longest)}

    def make_layers(self, config: EncoderConfig) -> list[nn.Module]:
        every = config.extra["every"]
        return [
            RotaryLayer(
                config,
                layer,
                Experts(config) if every and layer % every == 1 else self.make_mlp(config),
            )
            for layer in range(config.num_layers)
        ]

    def make_mlp(self, config: EncoderConfig) -> nn.Module:
        size, wide, extra = config.hidden_size, config.intermediate_size, config.extra
        biased = extra["mlp_bias"]
        up = (
            FusedLinear(size, {"fc11": wide, "fc12": wide}, bias=biased)
            if extra["gated"]
            else Linear(size, wide, bias=biased)
        )
        return Mlp(up, Linear(wide, size, bias=biased), config)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, type_ids: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(input_ids, positions, type_ids)
        rope, size = self.config.extra["rope"], self.config.head_dim
        rotation = rope and plain_rotation(positions, size, rope[0], x.dtype, divisor=rope[1])
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = layer(x, rotation)
        return x

    def place_tensors(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        found = [each._replace(name=each.name.removeprefix(self.other_base)) for each in tensors]
        return renamed_parts(super().place_tensors(found), self.tensor_names)


def check_only(config: Any, values: dict[str, Any]) -> None:
    """Raise `ValueError` if a member of config.json has another value than the supported one."""
    for name, value in values.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)!r:.60}, but only {value!r} is supported; choose "
                "another model"
            )


def plain_rope(config: Any) -> tuple[float, float]:
    """Return (theta, divisor of the frequencies). Raises `ValueError` for other scalings."""
    rope = config.rope_parameters or {}
    theta = positive("rope_theta", rope.get("rope_theta", config.rope_theta))
    match rope.get("rope_type", "default"):
        case "default":
            return theta, 1.0
        case "linear":
            return theta, positive("factor", rope.get("factor"))
        case kind:
            raise ValueError(
                f"rope scaling {kind!r:.60} of encoders is not supported; choose another model"
            )


def positive(name: str, value: Any) -> float:
    """Raise `ValueError` if the member of config.json is not a number above 0."""
    if (found := number(name, value)) <= 0:
        raise ValueError(f"{name} must be more than 0, got {found}; download the model again")
    return found


def rotary_fields(config: Any, theta: float, divisor: float, *, gated: bool) -> dict[str, Any]:
    """Return `Bert.config_fields` of encoders with `RotaryLayer`s."""
    fields = bert_fields(config)
    own = {
        "positions": 0,
        "rope": (theta, divisor),
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": bool(config.mlp_bias),
        "gated": gated,
        "every": 0,
    }
    activation = _GATED.get(config.hidden_act, config.hidden_act)
    return {**fields, "activation": activation, "extra": {**fields["extra"], **own}}
