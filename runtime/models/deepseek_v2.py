"""DeepSeek V2 (arXiv:2405.04434): latent attention, and after the first layers mixtures of experts
with shared experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..config.rope import gguf_rope
from ..layers.latent_attention import LatentAttention, LatentSizes
from ..layers.linear import StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.moe import FusedMoE, Router, Routing, SparseMoE
from ..layers.rope_scaling import yarn_mscale
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import renamed, within_layers
from .experts import MERGED, take_apart
from .qwen3_moe import GGUF_EXPERTS

ARCHITECTURE = "DeepseekV2ForCausalLM"
MODEL_TYPE = "deepseek_v2"
GGUF_ARCHITECTURE = "deepseek2"

GGUF_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
}
GGUF_ROUTING = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
# The name in GGUF files of the correction of expert scores, and its name here.
CORRECTION = {r"\.e_score_correction\.bias$": ".e_score_correction_bias"}
_SIGMOID = 2  # llama.cpp's number for experts that are scored by sigmoids.
_METHODS = ("greedy", "group_limited_greedy")  # Supported ways to choose experts.


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(ModelConfig):
    """The members of config.json for latent attention and experts."""

    attention_bias: bool = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = 0
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive(
            *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("n_shared_experts", "n_routed_experts", "moe_intermediate_size"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(LatentConfig):
    n_shared_experts: int = 2
    n_routed_experts: int = 64
    moe_intermediate_size: int = 1407
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None

    def __post_init__(self) -> None:
        LatentConfig.__post_init__(self)
        if self.topk_method not in _METHODS:
            raise ValueError(
                f"topk_method must be {' or '.join(_METHODS)}, got {self.topk_method!r:.60}; "
                "download the model again"
            )


class DeepseekV2ForCausalLM(CausalLM):
    """Layers after the last one, which predict further tokens, are no part of the model. See
    `NextLayer`.
    """

    config_class: ClassVar[type[ModelConfig]] = DeepseekV2Config
    attention_class: ClassVar[type[LatentAttention]] = LatentAttention
    config_defaults: ClassVar = {**CausalLM.config_defaults, "head_dim": 64}
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            **GGUF_BLOCK,
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.kv_b_proj.*.keys",
            "attn_v_b": "self_attn.kv_b_proj.*.values",
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = {
        **GGUF_ROUTING,
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    }

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return bool(get("expert_gating_func", 0) != _SIGMOID)

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        # Files that hold keys' and values' products as one have no sizes of latent vectors.
        key = get("attention.key_length_mla", 0) or get("attention.key_length")
        value = get("attention.value_length_mla", 0) or get("attention.value_length")
        groups = get("expert_group_count", 1)
        members = {
            "num_hidden_layers": get("block_count") - get("nextn_predict_layers", 0),
            "qk_nope_head_dim": key - get("rope.dimension_count"),
            "v_head_dim": value,
            "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
            "norm_topk_prob": bool(get("expert_weights_norm", False)),
            "n_group": groups,
            "topk_group": get("expert_group_used_count", 1),
        }
        if "blk.0.attn_q.weight" in tensors:
            members["q_lora_rank"] = None
        rope = gguf_rope(get, {})
        if "mscale_all_dim" in rope:
            # For this architecture llama.cpp's converter writes a tenth of the factor.
            rope["mscale_all_dim"] = rope["mscale"] = round(rope["mscale_all_dim"] * 10, 5)
            members["rope_scaling"] = rope
        return members

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        turned = config.qk_rope_head_dim
        return {
            "head_dim": config.qk_nope_head_dim + turned,
            "rotary_dim": turned,
            "num_kv_heads": 1,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return take_apart(within_layers(tensors, config.num_layers), MERGED)

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # llama.cpp stores the projections of keys, [R, N] for each head, and of values, [V, R],
        # apart. Here they are one weight, in which the rows of the keys of a head lie before those
        # of its values.
        found = []
        layers: dict[str, dict[tuple[int, bool], StoredTensor]] = {}
        for tensor in renamed(within_layers(tensors, config.num_layers), CORRECTION):
            if name := _OF_HEAD.fullmatch(tensor.name):
                part = int(name[2]), name[3] == "values"
                layers.setdefault(name[1], {})[part] = tensor
            else:
                found.append(tensor)
        for layer, parts in layers.items():
            found.append(_of_heads(f"{layer}.weight", [parts[key] for key in sorted(parts)]))
        return found

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
        sizes = LatentSizes(
            config.kv_lora_rank,
            config.qk_rope_head_dim,
            config.qk_nope_head_dim,
            config.v_head_dim,
            config.q_lora_rank,
        )
        sharper = 1.0
        if config.rope_type != "default" and config.rope_scaling.get("mscale_all_dim"):
            sharper = yarn_mscale(
                config.rope_scaling.get("factor", 1.0), config.rope_scaling["mscale_all_dim"]
            )
        return self.attention_class(
            config,
            layer,
            sizes,
            scale=config.head_dim**-0.5 * sharper**2,
            interleaved=getattr(config, "rope_interleave", True),
            bias=config.attention_bias,
        )

    def routing(self) -> Routing:
        """How experts are chosen. A group is rated by its best expert."""
        config = self.config
        has_groups = config.topk_method == "group_limited_greedy"
        return Routing(
            config.n_routed_experts,
            config.num_experts_per_tok,
            renormalized=False,
            num_groups=(config.n_group or 1) if has_groups else 1,
            top_groups=(config.topk_group or 1) if has_groups else 1,
            scale=config.routed_scaling_factor,
            group_best=1,
        )

    def has_experts(self, layer: int) -> bool:
        return bool(layer >= self.config.first_k_dense_replace)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        if not self.has_experts(layer):
            return super().make_mlp(layer)
        size, width, routing = config.hidden_size, config.moe_intermediate_size, self.routing()
        return SparseMoE(
            Router(size, routing, correction=routing.scoring == "sigmoid"),
            FusedMoE(size, width, config.n_routed_experts),
            GatedMLP(size, width * config.n_shared_experts),
        )


_OF_HEAD = re.compile(r"(.*\.kv_b_proj)\.(\d+)\.(keys|values)\.weight")


def _of_heads(name: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return the weight of all heads. `parts` alternate between keys and values."""
    shapes = [part.shape for part in parts]
    if len(parts) % 2 or any(len(shape) != 2 for shape in shapes):
        raise parts[0].fault("has no keys and values of each head beside it")
    rows = [shape[1 - number % 2] for number, shape in enumerate(shapes)]

    def copy_to(target: torch.Tensor) -> None:
        for number, (part, place) in enumerate(zip(parts, torch.split(target, rows), strict=True)):
            values = part.read()
            place.copy_(values if number % 2 else values.T)

    return StoredTensor(parts[0].file, name, (sum(rows), shapes[0][0]), copy_to)
