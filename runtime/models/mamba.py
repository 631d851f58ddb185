"""Mamba (arXiv:2312.00752): only mixers with a selective scan. The state of a request has the same
size for any length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import MixerLayer
from ..layers.linear import StoredTensor
from .causal_lm import CausalLM, gguf_names
from .checkpoint import from_llama_cpp, renamed
from .hybrid import (
    GGUF_FIRST_MAMBA,
    GGUF_FIRST_MAMBA_KEYS,
    MambaConfig,
    first_mamba_fields,
    first_mamba_in_gguf,
    first_mamba_tensors,
    mamba_mixer,
)

ARCHITECTURE = "MambaForCausalLM"
MODEL_TYPE = "mamba"
GGUF_ARCHITECTURE = "mamba"


class MambaForCausalLM(CausalLM):
    config_class: ClassVar[type[ModelConfig]] = MambaConfig
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        # It has no attention and no feed-forward.
        "num_attention_heads": 0,
        "intermediate_size": 0,
        # There is no limit. The number is that of llama.cpp's converter.
        "max_position_embeddings": 2**20,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config_names: ClassVar[dict[str, str]] = {
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "time_step_rank": "mamba_dt_rank",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    gguf_names: ClassVar[dict[str, str]] = gguf_names(
        {
            "attn_norm": "norm",
            **{key: name.replace("mamba.", "mixer.") for key, name in GGUF_FIRST_MAMBA.items()},
        }
    )
    gguf_keys: ClassVar[dict[str, str]] = GGUF_FIRST_MAMBA_KEYS

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return not get("ssm.dt_b_c_rms", False)

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        inner = get("ssm.inner_size")
        return {**first_mamba_in_gguf(get, tensors), "intermediate_size": inner}

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        return from_llama_cpp(tensors, "mixer", decays="A")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"the activation {config.hidden_act!r:.60} is not supported here; supported: silu"
            )
        return {
            **first_mamba_fields(config),
            # No code reads the heads of a model without attention.
            **dict.fromkeys(("num_heads", "num_kv_heads"), 1),
            **dict.fromkeys(("head_dim", "rotary_dim"), 2),
            "intermediate_size": config.intermediate_size
            or config.mamba_expand * config.hidden_size,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {
            r"^backbone\.embeddings?\.": "model.embed_tokens.",
            r"^backbone\.norm_f\.": "model.norm.",
            r"^backbone\.": "model.",
        }
        return first_mamba_tensors(renamed(tensors, names))

    def make_rotaries(self) -> Sequence[nn.Module]:
        return []

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config
        return MixerLayer(config, mamba_mixer(config, layer, config.intermediate_size))
