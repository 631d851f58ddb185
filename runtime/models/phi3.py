"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama with LongRoPE and rotation of a part of each head.
Checkpoints hold queries, keys and values in one tensor, and gates and up projections in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..config.model import sliding_windows
from ..layers.linear import StoredTensor
from .causal_lm import GGUF_BLOCK, CausalLM, gguf_names
from .checkpoint import unfused

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"
GGUF_ARCHITECTURE = "phi3"


def unfused_layers(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Split the tensors qkv_proj and gate_up_proj into their parts."""
    key = config.num_kv_heads * config.head_dim
    heads = {"q_proj": config.num_heads * config.head_dim, "k_proj": key, "v_proj": key}
    both = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
    return unfused(unfused(tensors, "qkv_proj", heads), "gate_up_proj", both)


class Phi3ForCausalLM(CausalLM):
    config_defaults: ClassVar = {
        **CausalLM.config_defaults,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    }
    takes_partial_rotary = True
    gguf_names: ClassVar[dict[str, str]] = gguf_names({**GGUF_BLOCK, "ffn_up": "mlp.gate_up_proj"})
    gguf_keys: ClassVar[dict[str, str]] = {"attention.sliding_window": "sliding_window"}

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        """Return the parameters. The first files name LongRoPE "yarn"."""
        rope = CausalLM.rope_parameters(content)
        if isinstance(rope, dict) and "yarn" in (rope.get("type"), rope.get("rope_type")):
            rope = {**rope, "type": "longrope", "rope_type": "longrope"}
        return rope

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        # 0 means none.
        return {"windows": sliding_windows(config, config.sliding_window or None, 0)}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return unfused_layers(config, tensors)

    gguf_tensors = checkpoint_tensors
