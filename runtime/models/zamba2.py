"""Zamba 2 (arXiv:2411.15242): Mamba 2 in all layers, and before some of them one of a few shared
blocks of attention and feed-forward, which each use of adapts by weights of low rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ..config.model import ModelConfig
from ..layers.activation import GATED
from ..layers.attention import attention
from ..layers.decoder import Decoder
from ..layers.linear import FusedLinear, Linear, StoredTensor
from ..layers.mamba2 import Mamba2Mixer
from ..layers.norm import GatedRMSNorm, RMSNorm
from ..layers.rotary import Rotary, Rotations, rotate
from .causal_lm import CausalLM
from .checkpoint import renamed, unfused
from .hybrid import Mamba2Config, kinds_of_layers, mamba_fields

ARCHITECTURE = "Zamba2ForCausalLM"
MODEL_TYPE = "zamba2"

_LONG_CONTEXT = 16384
_MIXER_EPS = 1e-5
"""Of the norm within a mixer, whatever the others' is."""
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
        """The layers that use a block, in turn."""
        kinds = self.layer_types or []
        return [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]

    @property
    def homes(self) -> list[int]:
        """Those of them with whose weights a checkpoint begins: where the embedding is not shared
        with the head, transformers shares no block either.
        """
        return self.uses[: self.num_mem_blocks] if self.tie_word_embeddings else self.uses


class SharedBlock(nn.Module):
    """The weights that several layers use."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, between = config.hidden_size, config.intermediate_size
        query, key = (each * config.head_dim for each in (config.num_heads, config.num_kv_heads))
        self.input_layernorm = RMSNorm(2 * size, config.norm_eps)
        self.qkv_proj = FusedLinear(2 * size, {"q_proj": query, "k_proj": key, "v_proj": key})
        self.o_proj = Linear(query, size)
        self.pre_ff_layernorm = RMSNorm(size, config.norm_eps)
        self.gate_up_proj = FusedLinear(
            size, {"gate_proj": between, "up_proj": between}, bias=config.add_bias_linear
        )
        self.down_proj = Linear(between, size, bias=config.add_bias_linear)


class BlockUse(nn.Module):
    """A block as one layer uses it, of `config`, a `Zamba2Config`: the stream and the embedding,
    both [T, hidden], side by side, to [T, hidden].
    """

    def __init__(self, config: Any, layer: int, block: SharedBlock) -> None:
        super().__init__()
        self.layer, self.block = layer, block
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.turns = config.head_dim, config.use_mem_rope
        self.activation = GATED[config.activation]
        size, rank = config.hidden_size, config.adapter_rank
        self.gate_up_adapter = _adapter(size, rank, 2 * config.intermediate_size)
        self.adapts_attention = config.use_shared_attention_adapter
        if self.adapts_attention:
            query, key = (each * self.head_dim for each in (self.num_heads, self.num_kv_heads))
            self.q_adapter = _adapter(2 * size, rank, query)
            self.k_adapter, self.v_adapter = (_adapter(2 * size, rank, key) for _ in range(2))

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """What this use keeps of a token."""
        return KVLayout(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_size=self.head_dim,
            value_size=self.head_dim,
            scale=(self.head_dim / 2) ** -0.5,
            dtype=dtype,
        )

    def forward(
        self, stream: torch.Tensor, embedded: torch.Tensor, rotations: Rotations
    ) -> torch.Tensor:
        block = self.block
        x = block.input_layernorm(torch.cat((stream, embedded), dim=-1))
        projected = block.qkv_proj(x)
        if self.adapts_attention:
            adapters = (self.q_adapter, self.k_adapter, self.v_adapter)
            projected = projected + torch.cat([adapter(x) for adapter in adapters], dim=-1)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        turned, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        if self.turns:
            turned = rotate(turned, rotations[0])
        q, k = turned.tensor_split([self.num_heads], dim=1)
        x = block.pre_ff_layernorm(block.o_proj(attention(q, k, v, self.layer)))
        output: torch.Tensor = block.down_proj(
            self.activation(block.gate_up_proj(x) + self.gate_up_adapter(x))
        )
        return output


def _adapter(size: int, rank: int, rows: int) -> nn.Module:
    return nn.Sequential(Linear(size, rank), Linear(rank, rows))


class ZambaLayer(nn.Module):
    """Of `config`, a `Zamba2Config`. `block`: that which it uses, whose result its mixer sees and
    the stream does not.
    """

    def __init__(self, config: Any, layer: int, block: SharedBlock | None) -> None:
        super().__init__()
        size, sizes, bias = config.hidden_size, config.mamba, config.add_bias_linear
        self.input_layernorm = RMSNorm(size, config.norm_eps)
        self.mamba = Mamba2Mixer(
            layer,
            size,
            sizes,
            GatedRMSNorm(sizes.inner, _MIXER_EPS, groups=sizes.groups),
            conv_bias=True,
            in_bias=bias,
            out_bias=bias,
        )
        self.use = None if block is None else BlockUse(config, layer, block)
        self.linear = None if block is None else Linear(size, size)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: Rotations,
        embedded: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer`; `embedded` [T, hidden]: the tokens' embedding."""
        if self.use is not None and self.linear is not None:
            stream = x if residual is None else x + residual
            seen = self.linear(self.use(stream, embedded, rotations))
            return self.mamba(self.input_layernorm.add(seen, stream)[0], rotations), stream
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        return self.mamba(x, rotations), residual


class ZambaDecoder(Decoder):
    """Whose layers see the tokens' embedding."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_tokens(input_ids)
        rotations = [rotary(positions) for rotary in self.rotaries]
        x, residual = embedded, None
        for layer in self.layers:
            x, residual = layer(x, residual, rotations, embedded)
        hidden: torch.Tensor = self.norm.add(x, residual)[0]  # type: ignore[operator]
        return hidden


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
                f"{heads} heads cannot share twice a hidden_size of {size}; fetch the model again"
            )
        if isinstance(kinds := config.layer_types, list):
            # As older files call them.
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
                    # Files may hold a block's weights at each of its uses.
                    continue
                if use is not None and int(use) < len(uses):
                    own = f"model.layers.{uses[int(use)]}.use.{adapter}_adapter."
                    name = own + name[shared.end() :]
            found.append(tensor._replace(name=name))
        return unfused(found, "gate_up_proj", {"gate_proj": size, "up_proj": size})

    def make_decoder(self) -> Decoder:
        config, uses = self.config, count()
        blocks = [SharedBlock(config) for _ in config.homes]
        layers = [
            ZambaLayer(config, layer, blocks[next(uses) % len(blocks)] if is_use else None)
            for layer, is_use in enumerate(each == "hybrid" for each in config.layer_types)
        ]
        rotaries = [Rotary(config)] if config.use_mem_rope else []
        norm = RMSNorm(config.hidden_size, config.norm_eps)
        return ZambaDecoder(config, layers, norm, rotaries)
