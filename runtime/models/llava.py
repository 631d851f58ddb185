"""LLaVA 1.5 (arXiv:2310.03744) and Pixtral (arXiv:2410.07073): images and text, by a Llama or a
Mistral.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config.model import sliding_windows
from ..layers.linear import StoredTensor
from .checkpoint import TEXT_ALONE, renamed
from .llama import LlamaForCausalLM
from .mistral import MistralForCausalLM

ARCHITECTURE = "LlavaForConditionalGeneration"
MODEL_TYPE = "llava"


class LlavaForConditionalGeneration(LlamaForCausalLM):
    """The text model. `runtime/multimodal/llava.py` and `pixtral.py` encode the images."""

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        text = config.text_config
        if (kind := text.get("model_type", "llama")) == "llama":
            return LlamaForCausalLM.config_fields(config)
        if kind != "mistral":
            raise ValueError(f"its text is a model of type {kind!r}, which is not supported")
        # Mistral has other defaults, and no biases.
        given = {**MistralForCausalLM.config_defaults, **text}
        return {
            "num_kv_heads": given["num_key_value_heads"],
            "max_position_embeddings": given["max_position_embeddings"],
            "windows": sliding_windows(config, given["sliding_window"], 0),
            "attention_bias": False,
            "mlp_bias": False,
        }

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)
