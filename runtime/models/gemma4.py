"""Gemma 4: Gemma 3 with normalised values, larger heads in layers with full attention, and a factor
of each layer. Small models have embeddings for each layer, and last layers that read the keys and
values of earlier ones, as in Gemma 3n. The model of 26B adds a mixture of experts to each
feed-forward.

Shapes: T tokens, P numbers of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, check_size, patterned_windows
from ..config.model_registry import UnsupportedError
from ..layers.activation import ACTIVATIONS
from ..layers.decoder import Decoder
from ..layers.images import embed_images
from ..layers.linear import Linear, StoredTensor, weight
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing
from ..layers.norm import RMSNorm
from ..layers.own_inputs import OwnInputDecoder
from ..layers.rotary import Rotary, Rotations
from ..layers.shared_attention import (
    Kept,
    SharedAttention,
    check_shared,
    shared_layer,
    without_shared,
)
from .causal_lm import gguf_names
from .checkpoint import renamed
from .experts import MERGED, take_apart
from .gemma2 import GGUF_SANDWICH
from .gemma3 import Gemma3ForCausalLM, local_theta, rope_of_kind

ARCHITECTURE = "Gemma4ForCausalLM"
MODEL_TYPE = "gemma4_text"
GGUF_ARCHITECTURE = "gemma4"

_GGUF_LAYER = {
    **GGUF_SANDWICH,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}
# Names of parts of a layer with experts in checkpoints, and here.
_EXPERTS = {
    r"\.router\.proj\.": ".mixture.router.",
    r"\.router\.scale$": ".mixture.router_norm.weight",
    r"\.router\.per_expert_scale$": ".mixture.expert_scale",
    r"\.pre_feedforward_layernorm_2\.": ".mixture.norm.",
    r"(layers\.\d+)\.experts\.": r"\1.mixture.experts.",
}
# Transformers' rotation of layers with full attention.
_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """The members of config.json.

    `head_dim` and `num_key_value_heads` are those of layers with a window, and the members with
    `global` in their names those of the others. `rope_local_base_freq` is theta of layers with a
    window. `per_layer_config` has the sizes of single layers, in files of newer code.
    """

    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float = 10000.0
    vocab_size_per_layer_input: int | None = 262144
    hidden_size_per_layer_input: int = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, Any] | None = None
    use_bidirectional_attention: str | None = None
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    image_token_id: int | None = None
    pad_token_id: int | None = 0
    expert_activations: ClassVar[tuple[str, ...]] = ("silu", "gelu_pytorch_tanh")

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive(
            *("final_logit_softcapping", "vocab_size_per_layer_input", "global_head_dim"),
            "num_global_key_value_heads",
        )
        if self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if type(value := getattr(self, name)) is not int:
                    raise ValueError(
                        f"{name} must be a whole number, got {value!r:.60}; download the model "
                        "again"
                    )
                check_size(name, value)
        check_shared(self, self.num_kv_shared_layers)

    def of_layer(self, layer: int) -> Gemma4Config:
        """Return the config with the sizes of a layer's heads."""
        if self.windows[layer] is not None:
            return self
        size, kv_heads = self.global_head_dim, self.num_global_key_value_heads
        return replace(
            self, head_dim=size, rotary_dim=size, num_kv_heads=kv_heads or self.num_kv_heads
        )


def _global_sizes(config: Any, windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the sizes of heads of layers with full attention. Raises `ValueError`."""
    if config.per_layer_config is None:
        kv_heads = config.num_global_key_value_heads if config.attention_k_eq_v else None
        return {"num_global_key_value_heads": kv_heads}
    full = [str(layer) for layer, window in enumerate(windows) if window is None]
    of_layers = list(config.per_layer_config.values())
    if sorted(config.per_layer_config) != sorted(full) or any(
        each != of_layers[0] or not isinstance(each, dict) for each in of_layers
    ):
        raise UnsupportedError(
            "per_layer_config must have the same sizes for all layers with full attention, and "
            "none for others; choose another model"
        )
    sizes = of_layers[0]
    return {
        "global_head_dim": sizes.get("head_dim", config.head_dim),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
        "per_layer_config": None,
    }


class Gemma4Experts(nn.Module):
    """Maps x [T, hidden], before the norm of the dense layer, to the sum of a token's experts."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        experts, top_k = config.num_experts, config.top_k_experts
        assert experts is not None and top_k is not None
        assert config.moe_intermediate_size is not None
        routing = Routing(experts, top_k, least_sum=0.0)
        self.router_norm = RMSNorm(size, eps)
        self.root = size**-0.5
        self.router = Router(size, routing)
        self.expert_scale = weight(experts)
        self.norm = RMSNorm(size, eps)
        self.experts = FusedMoE(
            size, config.moe_intermediate_size, experts, activation=config.activation
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router.choose(self.router_norm(x) * self.root)
        result: torch.Tensor = self.experts(self.norm(x), ids, weights * self.expert_scale[ids])
        return result


class Gemma4Layer(nn.Module):
    def __init__(self, config: Gemma4Config, attention: SharedAttention, mlp: nn.Module) -> None:
        super().__init__()
        size, eps, width = config.hidden_size, config.norm_eps, config.hidden_size_per_layer_input
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.layer_scalar = weight(1)
        self.mixture = Gemma4Experts(config) if config.enable_moe_block else None
        if self.mixture is not None:
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(size, eps)
        if width:
            self.per_layer_input_gate = Linear(size, width)
            self.per_layer_projection = Linear(width, size)
            self.post_per_layer_input_norm = RMSNorm(size, eps)
            self.activation = ACTIVATIONS[config.activation]

    def forward(
        self, x: torch.Tensor, own_input: torch.Tensor | None, rotations: Rotations, kept: Kept
    ) -> torch.Tensor:
        """Return hidden states of x [T, hidden] and the layer's own input [T, P], if it has one.

        `kept`: see `SharedAttention.attend`.
        """
        attended = self.self_attn.attend(self.input_layernorm(x), rotations, kept)
        fed, x = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(attended), x)
        result = self.mlp(fed)
        if self.mixture is not None:
            dense = self.post_feedforward_layernorm_1(result)
            result = dense + self.post_feedforward_layernorm_2(self.mixture(x))
        x = x + self.post_feedforward_layernorm(result)
        if own_input is not None:
            gated = self.activation(self.per_layer_input_gate(x)) * own_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class Gemma4Decoder(OwnInputDecoder):
    def __init__(
        self,
        config: Gemma4Config,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        rotaries: Sequence[nn.Module],
        *,
        embedding_scale: float,
    ) -> None:
        super().__init__(config, layers, norm, rotaries, embedding_scale=embedding_scale)
        self.image_id, self.pad_id = config.image_token_id, config.pad_token_id or 0
        self.has_own_inputs = config.hidden_size_per_layer_input > 0
        if self.has_own_inputs:
            rows = config.vocab_size_per_layer_input or config.vocab_size
            self.add_own_inputs(config, rows, config.hidden_size_per_layer_input)
            self.projection_scale, self.input_scale = config.hidden_size**-0.5, 0.5**0.5

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids, positions)
        rotations = [rotary(positions) for rotary in self.rotaries]
        if self.takes_images:
            embed_images(x, rotations, turned=False)
        inputs: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.has_own_inputs:
            ids = torch.where(input_ids < self.rows, input_ids, self.pad_id)
            if self.image_id is not None:
                ids = torch.where(input_ids == self.image_id, self.pad_id, ids)
            inputs = self.own_inputs(x, ids)
        kept: Kept = {}
        for layer, own_input in zip(self.layers, inputs, strict=True):
            x = layer(x, own_input, rotations, kept)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Gemma4Config
    config_defaults: ClassVar = {
        **Gemma3ForCausalLM.config_defaults,
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "sliding_window": 512,
    }

    gguf_names: ClassVar[dict[str, str]] = {
        **gguf_names(_GGUF_LAYER),
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    gguf_lists: ClassVar[tuple[str, ...]] = ("feed_forward_length",)

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        return rope_of_kind(content, "full_attention") or dict(_ROPE)

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.use_bidirectional_attention not in (None, "vision"):
            raise ValueError(
                "use_bidirectional_attention must be null or vision, got "
                f"{config.use_bidirectional_attention!r:.60}; choose another model"
            )
        if config.sliding_window is None:
            raise ValueError("it has no sliding_window; download the model again")
        windows = patterned_windows(config, config.sliding_window, 6)
        # The last layer always has full attention.
        windows[-1:] = [None]
        rows = config.vocab_size_per_layer_input or config.vocab_size
        return {
            "vocab_size_per_layer_input": rows if config.hidden_size_per_layer_input else None,
            "windows": windows,
            "rope_local_base_freq": local_theta(config, config.rope_local_base_freq),
            **_global_sizes(config, windows),
        }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return members with other forms in files, and what files do not hold as the published
        models have it.
        """
        widths = get("feed_forward_length", kind=list)
        slides = get("attention.sliding_window_pattern", kind=list)
        slides = slides if isinstance(slides, list) else []
        heads = get("attention.head_count_kv", get("attention.head_count"), list)
        kv_heads = dict(zip(slides, heads, strict=False)) if isinstance(heads, list) else {}
        full = slides.index(False) if False in slides else 0
        has_own_inputs = get("embedding_length_per_layer_input", 0) > 0
        rope = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4, float)}
        return {
            "head_dim": get("attention.key_length_swa", get("attention.key_length")),
            "global_head_dim": get("attention.key_length"),
            "num_key_value_heads": kv_heads.get(True, heads),
            "num_global_key_value_heads": kv_heads.get(False),
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
            "intermediate_size": min(widths) if isinstance(widths, list) else widths,
            "use_double_wide_mlp": isinstance(widths, list) and min(widths) < max(widths),
            "vocab_size_per_layer_input": None,
            "use_bidirectional_attention": None if has_own_inputs else "vision",
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {**_ROPE, "rope_theta": get("rope.freq_base", 1e6, float)},
                "sliding_attention": rope,
            },
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {r"\.layer_scalar\.weight$": ".layer_scalar"}
        return Gemma4ForCausalLM.checkpoint_tensors(config, renamed(tensors, names))

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        found = without_shared(tensors, config.num_layers - config.num_kv_shared_layers)
        return take_apart(renamed(found, _EXPERTS), MERGED)

    def make_rotaries(self) -> Sequence[nn.Module]:
        config = self.config
        size, theta = config.global_head_dim, config.rope_local_base_freq
        local = replace(config, rope_theta=theta, rope_type="default", rope_scaling={})
        return [Rotary(replace(config, head_dim=size, rotary_dim=size)), Rotary(local)]

    def make_decoder(self) -> Decoder:
        config = self.config
        layers = [self.make_layer(layer) for layer in range(config.num_layers)]
        norm, scale = RMSNorm(config.hidden_size, config.norm_eps), self.embedding_scale()
        return Gemma4Decoder(config, layers, norm, self.make_rotaries(), embedding_scale=scale)

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        shares = shared_layer(config, config.num_kv_shared_layers, layer)
        only_keys = config.attention_k_eq_v and config.windows[layer] is None
        attention = SharedAttention(
            config.of_layer(layer),
            layer,
            shares,
            only_keys=only_keys,
            narrow_spans=config.use_bidirectional_attention == "vision",
        )
        return Gemma4Layer(config, attention, self.make_mlp(layer))

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        is_wide = config.use_double_wide_mlp and (
            layer >= config.num_layers - config.num_kv_shared_layers
        )
        between = config.intermediate_size * (1 + is_wide)
        return GatedMLP(config.hidden_size, between, activation=config.activation)
