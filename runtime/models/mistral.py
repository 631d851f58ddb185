"""Mistral: Llama without biases, whose layers may all have a sliding window."""

from __future__ import annotations

from typing import Any

from ..model_config import sliding_windows
from .llama import LlamaForCausalLM

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"
# Its GGUF files call it llama.


class MistralForCausalLM(LlamaForCausalLM):
    """Whatever its config.json says of biases, it has none."""

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {"windows": sliding_windows(config)}
