"""Qwen3-VL for images and text: Qwen3 with rotary positions of three kinds. Results of several
layers of the vision tower are added after the first layers (DeepStack, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.model import ModelConfig
from ..layers.decoder import Decoder
from ..layers.linear import StoredTensor
from .causal_lm import CausalLM
from .checkpoint import TEXT_ALONE, renamed
from .qwen3 import Qwen3Config, Qwen3ForCausalLM

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
MODEL_TYPE = "qwen3_vl"
GGUF_ARCHITECTURE = "qwen3vl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(Qwen3Config):
    """`deep_stages` is the number of layers after which images are added."""

    deep_stages: int = 0


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """The text model. `runtime/multimodal/qwen_vl.py` encodes the images."""

    config_class: ClassVar[type[ModelConfig]] = Qwen3VLConfig
    turns_images = True
    gguf_keys: ClassVar[dict[str, str]] = {"n_deepstack_layers": "deep_stages"}

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        rope = CausalLM.rope_parameters(content)
        if not isinstance(rope, dict):
            return rope
        return {name: value for name, value in rope.items() if not name.startswith("mrope_")}

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        vision = getattr(config, "vision_config", None) or {}
        # GGUF files say the number alone.
        deep = len(vision.get("deepstack_visual_indexes") or ()) or config.deep_stages
        return {**Qwen3ForCausalLM.config_fields(config), "deep_stages": deep}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        return renamed(tensors, TEXT_ALONE)

    def make_decoder(self) -> Decoder:
        decoder = super().make_decoder()
        decoder.deep_stages = self.config.deep_stages
        return decoder
