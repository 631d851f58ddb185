"""Zamba 2 (arXiv:2411.15242): Mamba 2 in all layers. Some layers are preceded by one of a few
shared blocks of attention and feed-forward, which weights of low rank adapt to each use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import Decoder
from ..layers.linear import Linear, StoredTensor
from ..layers.mamba2 import Mamba2Mixer
from ..layers.norm import GatedRMSNorm, RMSNorm
from ..layers.rotary import Rotary, Rotations, rotate
from .causal_lm import CausalLM
from .checkpoint import renamed, unfused
from .hybrid import Mamba2Config, kinds_of_layers, mamba_fields
from .zamba import BlockUse, SharedBlock, ZambaDecoder, ZambaLayer

ARCHITECTURE = "Zamba2ForCausalLM"
MODEL_TYPE = "zamba2"

_LONG_CONTEXT = 16384
_MIXER_EPS = 1e-5  # Epsilon of the norm in a mixer, independent of that of other norms.
_NAMES = {
    r"^model\.final_layernorm\.": "model.norm.",
    r"\.mamba_decoder\.": ".",
    r"\.shared_transformer\.self_attn\.linear_([qkv])_adapter_list\.": r".adapters.\1.",
    r"\.shared_transformer\.feed_forward\.gate_up_proj_adapter_list\.": ".adapters.gate_up.",
    r"\.shared_transformer\.(self_attn\.|feed_forward\.)?": ".use.block.",
}
_OF_A_BLOCK = re.compile(r"model\.layers\.(\d{1,5})\.(?:adapters\.(\w+)\.(\d{1,5})|use\.block)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(Mamba2Config):
    layer_types: list[str] | None = None
    mamba_n_heads: int = 8
    mamba_d_state: int = 64
    time_step_min: float = 0.001
    num_mem_blocks: int = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 128
    add_bias_linear: bool = False
    use_mem_rope: bool = False
    use_long_context: bool = False

    def __post_init__(self) -> None:
        Mamba2Config.__post_init__(self)
        self.check_positive("num_mem_blocks", "adapter_rank")

    @property
    def uses(self) -> list[int]:
        """The layers that use a block, in order."""
        kinds = self.layer_types or []
        return [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]

    @property
    def homes(self) -> list[int]:
        """The layers under whose names a checkpoint holds the blocks.

        If the embedding is not tied to the head, transformers shares no block either.
        """
        return self.uses[: self.num_mem_blocks] if self.tie_word_embeddings else self.uses


class AdaptedUse(BlockUse):
    """A use of a block with adapters added to its projections. `config` is a `Zamba2Config`."""

    def __init__(self, config: Any, layer: int, block: SharedBlock) -> None:
        super().__init__(config, layer, block)
        self.turns = config.use_mem_rope
        size, rank = config.hidden_size, config.adapter_rank
        self.gate_up_adapter = _adapter(size, rank, 2 * config.intermediate_size)
        self.adapts_attention = config.use_shared_attention_adapter
        if self.adapts_attention:
            query, key = (each * self.head_dim for each in (self.num_heads, self.num_kv_heads))
            self.q_adapter = _adapter(2 * size, rank, query)
            self.k_adapter, self.v_adapter = (_adapter(2 * size, rank, key) for _ in range(2))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        projected = super().project(x)
        if not self.adapts_attention:
            return projected
        adapters = (self.q_adapter, self.k_adapter, self.v_adapter)
        return projected + torch.cat([adapter(x) for adapter in adapters], dim=-1)

    def open(self, x: torch.Tensor) -> torch.Tensor:
        opened: torch.Tensor = super().open(x) + self.gate_up_adapter(x)
        return opened

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        return rotate(heads, rotations[0]) if self.turns else heads


def _adapter(size: int, rank: int, rows: int) -> nn.Module:
    return nn.Sequential(Linear(size, rank), Linear(rank, rows))


def _mixer(config: Any, layer: int) -> Mamba2Mixer:
    sizes, bias = config.mamba, config.add_bias_linear
    return Mamba2Mixer(
        layer,
        config.hidden_size,
        sizes,
        GatedRMSNorm(sizes.inner, _MIXER_EPS, groups=sizes.groups),
        conv_bias=True,
        in_bias=bias,
        out_bias=bias,
    )


class Zamba2ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = Zamba2Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": 0,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "hidden_act": "gelu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config_names: ClassVar[dict[str, str]] = {
        "layers_block_type": "layer_types",
        "n_mamba_heads": "mamba_n_heads",
        "mamba_ngroups": "mamba_n_groups",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        size, heads = config.hidden_size, config.num_attention_heads
        if heads < 1 or 2 * size % heads:
            raise ValueError(
                f"{heads} heads cannot share twice a hidden_size of {size}; "
                "download the model again"
            )
        if isinstance(kinds := config.layer_types, list):
            # The names in older files.
            old = {"mamba": "linear_attention"}
            config.layer_types = [old.get(str(kind), kind) for kind in kinds]
        default = ["linear_attention"] * 54
        for layer in (*range(6, 48, 6), 47, 51):
            default[layer] = "hybrid"
        if config.use_long_context:
            config.max_position_embeddings = _LONG_CONTEXT
        return {
            **kinds_of_layers(config, ("linear_attention", "hybrid"), default),
            **mamba_fields(config, config.mamba_expand * size),
            "time_step_limit": [config.time_step_min, float("inf")],
            "intermediate_size": config.intermediate_size or 4 * size,
            "max_position_embeddings": config.max_position_embeddings,
            "head_dim": 2 * size // heads,
            "rotary_dim": 0,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        size, uses, homes, found = config.intermediate_size, config.uses, config.homes, []
        for tensor in renamed(tensors, _NAMES):
            name = tensor.name
            if shared := _OF_A_BLOCK.match(name):
                layer, adapter, use = shared.groups()
                home = homes[int(use) % len(homes)] if use and homes else int(layer)
                if int(layer) != home or home not in homes:
                    # Files may repeat the weights of a block at each use.
                    continue
                if use is not None and int(use) < len(uses):
                    own = f"model.layers.{uses[int(use)]}.use.{adapter}_adapter."
                    name = own + name[shared.end() :]
            found.append(tensor._replace(name=name))
        return unfused(found, "gate_up_proj", {"gate_proj": size, "up_proj": size})

    def make_decoder(self) -> Decoder:
        config, uses = self.config, count()
        blocks = [SharedBlock(config, bias=config.add_bias_linear) for _ in config.homes]
        layers = [
            ZambaLayer(
                config,
                _mixer(config, layer),
                AdaptedUse(config, layer, blocks[next(uses) % len(blocks)])
                if kind == "hybrid"
                else None,
            )
            for layer, kind in enumerate(config.layer_types)
        ]
        rotaries = [Rotary(config)] if config.use_mem_rope else []
        norm = RMSNorm(config.hidden_size, config.norm_eps)
        return ZambaDecoder(config, layers, norm, rotaries)
