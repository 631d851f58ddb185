"""Mamba 2 (arXiv:2405.21060), such as Codestral Mamba: only mixers with a recurrent state. The
state of a request has the same size for any length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import MixerLayer
from ..layers.linear import StoredTensor
from .causal_lm import CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .hybrid import GGUF_MAMBA, GGUF_MAMBA_KEYS, Mamba2Config, mamba2_mixer, mamba_fields

ARCHITECTURE = "Mamba2ForCausalLM"
MODEL_TYPE = "mamba2"
GGUF_ARCHITECTURE = "mamba2"


@dataclass(frozen=True, slots=True, kw_only=True)
class PureMamba2Config(Mamba2Config):
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    mamba_d_head: int | str = 64


class Mamba2ForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = PureMamba2Config
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        # It has no attention and no feed-forward.
        "num_attention_heads": 0,
        "intermediate_size": 0,
        # There is no limit. The number is that of llama.cpp's converter.
        "max_position_embeddings": 2**20,
        "rms_norm_eps": 1e-5,
    }
    config_names: ClassVar[dict[str, str]] = {
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    }

    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            "attn_norm": "norm",
            **{key: name.replace("mamba.", "mixer.") for key, name in GGUF_MAMBA.items()},
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = GGUF_MAMBA_KEYS

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        inner = get("ssm.inner_size")
        return {
            "mamba_expand": inner // max(get("embedding_length"), 1),
            # `config_names` maps this name in config.json to `mamba_d_head`.
            "head_dim": inner // max(get("ssm.time_step_rank"), 1),
            "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
            "mamba_proj_bias": "blk.0.ssm_in.bias" in tensors,
        }

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "mixer")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"the activation {config.hidden_act!r:.60} is not supported here; supported: silu"
            )
        inner = config.mamba_expand * config.hidden_size
        return {
            **mamba_fields(config, inner),
            "num_heads": config.mamba_n_heads,
            "num_kv_heads": config.mamba_n_heads,
            "intermediate_size": inner,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        # The names in Codestral Mamba's own file begin with one more component.
        names = {
            r"^(model\.)?backbone\.embeddings?\.": "model.embed_tokens.",
            r"^(model\.)?backbone\.norm_f\.": "model.norm.",
            r"^(model\.)?backbone\.": "model.",
            r"^model\.lm_head\.": "lm_head.",
        }
        return renamed(tensors, names)

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_layer(self, layer: int) -> nn.Module:
        return MixerLayer(self.config, mamba2_mixer(self.config, layer))
