"""Which class builds which architecture."""

from __future__ import annotations

from ..model_config import ModelConfig
from .llama import LlamaForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The model with uninitialised weights, in torch's default dtype and device."""
    return MODELS[config.architecture](config)
