"""Zamba (arXiv:2405.16712): Mamba in all layers, in heads with step sizes of their own. Some layers
are preceded by one shared block of attention without positions and a feed-forward.
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
from ..layers.mamba import MambaSizes, SelectiveMixer
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotations
from .causal_lm import CausalLM
from .checkpoint import changed, renamed, reordered
from .experts import Merged, take_apart
from .hybrid import (
    MambaConfig,
    first_mamba_fields,
    first_mamba_tensors,
    kinds_of_layers,
    mamba_sizes,
)

ARCHITECTURE = "ZambaForCausalLM"
MODEL_TYPE = "zamba"

_OF_A_BLOCK = re.compile(r"model\.layers\.(\d{1,5})\.use\.block\.")
_MERGED = {name: Merged((name,)) for name in ("x_proj", "dt_proj")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZambaConfig(MambaConfig):
    layer_types: list[str] | None = None
    n_mamba_heads: int = 2
    attn_layer_period: int = 6
    attn_layer_offset: int = 4

    def __post_init__(self) -> None:
        MambaConfig.__post_init__(self)
        if self.n_mamba_heads < 1 or self.mamba_expand * self.hidden_size % self.n_mamba_heads:
            raise ValueError(
                f"n_mamba_heads is {self.n_mamba_heads}, which does not divide "
                f"{self.mamba_expand * self.hidden_size} channels; download the model again"
            )


class SharedBlock(nn.Module):
    """The weights that several layers use."""

    def __init__(self, config: Any, *, bias: bool = False) -> None:
        super().__init__()
        size, between = config.hidden_size, config.intermediate_size
        query, key = (each * config.head_dim for each in (config.num_heads, config.num_kv_heads))
        self.input_layernorm = RMSNorm(2 * size, config.norm_eps)
        self.qkv_proj = FusedLinear(2 * size, {"q_proj": query, "k_proj": key, "v_proj": key})
        self.o_proj = Linear(query, size)
        self.pre_ff_layernorm = RMSNorm(size, config.norm_eps)
        self.gate_up_proj = FusedLinear(size, {"gate_proj": between, "up_proj": between}, bias=bias)
        self.down_proj = Linear(between, size, bias=bias)


class BlockUse(nn.Module):
    """The use of a block by one layer. Maps stream and embedding, both [T, hidden], side by side,
    to [T, hidden].
    """

    def __init__(self, config: Any, layer: int, block: SharedBlock) -> None:
        super().__init__()
        self.layer, self.block = layer, block
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.activation = config.head_dim, GATED[config.activation]

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Return what this use keeps of a token."""
        return KVLayout(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_size=self.head_dim,
            value_size=self.head_dim,
            scale=(self.head_dim / 2) ** -0.5,
            dtype=dtype,
        )

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values of x [T, 2 * hidden], side by side."""
        projected: torch.Tensor = self.block.qkv_proj(x)
        return projected

    def open(self, x: torch.Tensor) -> torch.Tensor:
        """Return gates and up projections of x [T, hidden]."""
        opened: torch.Tensor = self.block.gate_up_proj(x)
        return opened

    def turn(self, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Rotate queries and keys [T, heads + kv heads, D] by their positions."""
        return heads

    def forward(
        self, stream: torch.Tensor, embedded: torch.Tensor, rotations: Rotations
    ) -> torch.Tensor:
        block = self.block
        x = block.input_layernorm(torch.cat((stream, embedded), dim=-1))
        heads = self.project(x).view(len(x), -1, self.head_dim)
        turned, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        q, k = self.turn(turned, rotations).tensor_split([self.num_heads], dim=1)
        x = block.pre_ff_layernorm(block.o_proj(attention(q, k, v, self.layer)))
        output: torch.Tensor = block.down_proj(self.activation(self.open(x)))
        return output


class ZambaLayer(nn.Module):
    """A mixer. The result of `use`, a use of the block, is added only to the input of the mixer."""

    def __init__(self, config: Any, mixer: nn.Module, use: BlockUse | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config.norm_eps)
        self.mamba, self.use = mixer, use
        self.linear = None if use is None else Linear(size, size)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: Rotations,
        embedded: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`. `embedded` [T, hidden] is the embedding of the tokens."""
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
    """A decoder that also passes the embedding of the tokens to its layers."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_tokens(input_ids)
        rotations = [rotary(positions) for rotary in self.rotaries]
        x, residual = embedded, None
        for layer in self.layers:
            x, residual = layer(x, residual, rotations, embedded)
        hidden: torch.Tensor = self.norm.add(x, residual)[0]  # type: ignore[operator]
        return hidden


class Head(nn.Module):
    """The projections that give dt, b and c of some channels."""

    def __init__(self, channels: int, sizes: MambaSizes) -> None:
        super().__init__()
        self.x_proj = Linear(channels, sizes.rank + 2 * sizes.state)
        self.dt_proj = Linear(sizes.rank, channels)


class HeadsMixer(SelectiveMixer):
    """A mixer made of heads. `config` is a `ZambaConfig`."""

    def __init__(self, config: Any, layer: int) -> None:
        sizes = mamba_sizes(config, config.mamba_expand * config.hidden_size)
        biases = {"conv_bias": config.mamba_conv_bias, "bias": config.mamba_proj_bias}
        super().__init__(layer, config.hidden_size, sizes, **biases)
        heads = config.n_mamba_heads
        self.heads = nn.ModuleList(Head(sizes.inner // heads, sizes) for _ in range(heads))

    def select(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank, state = self.sizes.rank, self.sizes.state
        found: list[tuple[torch.Tensor, ...]] = []
        heads: list[Any] = list(self.heads)
        for head, part in zip(heads, x.chunk(len(heads), dim=-1), strict=True):
            dt, b, c = head.x_proj(part).split([rank, state, state], dim=-1)
            found.append((head.dt_proj(dt), b, c))
        dt, b, c = (torch.cat(each, dim=-1) for each in zip(*found, strict=True))
        return dt, b, c


class ZambaForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = ZambaConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 32000,
        "hidden_size": 3712,
        "intermediate_size": 14848,
        "num_hidden_layers": 76,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config_names: ClassVar[dict[str, str]] = {
        "layers_block_type": "layer_types",
        "attention_head_dim": "head_dim",
    }

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        size, heads = config.hidden_size, config.num_attention_heads
        if heads < 1 or 2 * size % heads:
            raise ValueError(
                f"{heads} heads cannot share twice a hidden_size of {size}; "
                "download the model again"
            )
        if (said := getattr(config, "hidden_mamba_act", "silu")) not in ("silu", "swish"):
            raise ValueError(
                f"hidden_mamba_act must be silu, got {said!r:.60}; choose another model"
            )
        if config.attn_layer_period < 1:
            raise ValueError(
                f"attn_layer_period must be more than 0, got {config.attn_layer_period}; download "
                "the model again"
            )
        if isinstance(kinds := config.layer_types, list):
            # The names in older files.
            old = {"mamba": "linear_attention"}
            config.layer_types = [old.get(str(kind), kind) for kind in kinds]
        period, offset = config.attn_layer_period, config.attn_layer_offset
        # Layer 2, and those that are counted from layer 3 on.
        default = [
            "hybrid"
            if layer == 2 or (layer > 2 and (layer - 3) % period == offset)
            else "linear_attention"
            for layer in range(config.num_hidden_layers)
        ]
        return {
            **kinds_of_layers(config, ("linear_attention", "hybrid"), default),
            **first_mamba_fields(config),
            "head_dim": config.head_dim or 2 * size // heads,
            "rotary_dim": 0,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            r"^model\.final_layernorm\.": "model.norm.",
            r"\.mamba_decoder\.input_layernorm\.": ".input_layernorm.",
            r"\.(mamba_decoder\.)?mamba\.(x|dt)_proj_weight$": r".mamba.experts.\2_proj",
            r"\.(mamba_decoder\.)?mamba\.dt_proj_bias$": ".mamba.dt_proj.bias",
            r"\.mamba_decoder\.": ".",
            r"\.shared_transf\.(self_attn\.|feed_forward\.)?": ".use.block.",
        }
        channels = config.mamba_expand * config.hidden_size
        # Rows of x and of gates alternate.
        turns = [*range(0, 2 * channels, 2), *range(1, 2 * channels, 2)]
        home, found = _homes(config), []
        for tensor in take_apart(renamed(tensors, names), _MERGED):
            name = tensor.name.replace(".mamba.experts.", ".mamba.heads.")
            if (shared := _OF_A_BLOCK.match(name)) and int(shared[1]) not in home:
                # Files may repeat the weights of the block at each use.
                continue
            if ".mamba.in_proj." in name:
                tensor = reordered(tensor, 0, turns, 1)
            elif name.endswith((".A_log", ".D", ".dt_proj.bias")) and len(tensor.shape) > 1:
                heads, each, *numbers = tensor.shape
                tensor = changed(tensor, (heads * each, *numbers))
            found.append(tensor._replace(name=name))
        return first_mamba_tensors(found)

    def make_decoder(self) -> Decoder:
        config, uses = self.config, count()
        blocks = [SharedBlock(config) for _ in _homes(config)]
        layers = [
            ZambaLayer(
                config,
                HeadsMixer(config, layer),
                BlockUse(config, layer, blocks[next(uses) % len(blocks)])
                if kind == "hybrid"
                else None,
            )
            for layer, kind in enumerate(config.layer_types)
        ]
        return ZambaDecoder(config, layers, RMSNorm(config.hidden_size, config.norm_eps), [])


def _homes(config: Any) -> list[int]:
    """Return the layers under whose names a checkpoint holds the blocks.

    That is the first use. If the embedding is not tied to the head, transformers does not share the
    block either.
    """
    uses = [layer for layer, kind in enumerate(config.layer_types) if kind == "hybrid"]
    return uses[:1] if config.tie_word_embeddings else uses
