"""OLMo 3 (Ai2): OLMo 2 with a sliding window in three of four layers."""

from __future__ import annotations

from typing import Any, ClassVar

from ..config.model import patterned_windows
from .gemma3 import local_theta, rope_of_kind
from .olmo2 import Olmo2ForCausalLM

ARCHITECTURE = "Olmo3ForCausalLM"
MODEL_TYPE = "olmo3"
# GGUF files name it olmo2.


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    config_defaults: ClassVar = {
        **Olmo2ForCausalLM.config_defaults,
        "sliding_window": 4096,
        "rope_theta": 500000.0,
    }

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        return rope_of_kind(content, "full_attention")

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        return {
            "windows": patterned_windows(config, config.sliding_window, 4),
            "rope_local_base_freq": local_theta(config, None),
        }
