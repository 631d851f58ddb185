"""The vision tower of Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from typing import Any, ClassVar

from ...files.gguf_reader import FastGGUFReader
from . import qwen2vl
from .projector import Stored

PROJECTOR_TYPES = ["qwen3vl_merger"]
_LAYER = qwen2vl.LAYER
# By the kind of the text model: the architecture, `model_type` of both, and the frequencies for the
# frames, rows and columns in the published models.
_MODELS = {
    "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl", (24, 20, 20, 0)),
    "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3_5", (11, 11, 10, 0)),
    "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", (11, 11, 10, 0)),
}


class OfFile(qwen2vl.OfFile):
    """That of Qwen2-VL with learned positions, and mergers after some layers (DeepStack)."""

    text_kinds = tuple(_MODELS)
    pixels = (65536, 16777216)
    names: ClassVar = {
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "v.blk.{}.ln1": f"{_LAYER}.norm1",
        "v.blk.{}.ln2": f"{_LAYER}.norm2",
        "v.blk.{}.attn_qkv": f"{_LAYER}.attn.qkv",
        "v.blk.{}.attn_out": f"{_LAYER}.attn.proj",
        "v.blk.{}.ffn_up": f"{_LAYER}.mlp.linear_fc1",
        "v.blk.{}.ffn_down": f"{_LAYER}.mlp.linear_fc2",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    }

    def __init__(self, reader: FastGGUFReader, text: FastGGUFReader) -> None:
        super().__init__(reader, text)
        if self.text_kind in _MODELS:
            self.architecture, self.model_type, self.sections = _MODELS[self.text_kind]
            self.text_type = f"{self.model_type}_text"

    @property
    def _deep(self) -> list[int]:
        """The layers after which a merger follows."""
        named = (name.split(".") for name in self.shapes if name.startswith("v.deepstack."))
        return sorted({int(parts[2]) for parts in named})

    def vision(self) -> dict[str, Any]:
        return {
            **self.vision_of_both(),
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self.shapes["v.blk.0.ffn_up.weight"][0],
            "out_hidden_size": self.text_width,
            "num_position_embeddings": self.shapes["v.position_embd.weight"][0],
            # `use_gelu` means the form by tanh.
            "hidden_act": "gelu_pytorch_tanh",
            **({"deepstack_visual_indexes": self._deep} if self.text_kind == "qwen3vl" else {}),
        }

    def change(self, stored: Stored) -> Stored:
        stored = super().change(stored)
        parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
        for number, layer in enumerate(self._deep):
            for part, name in parts.items():
                for kind in ("weight", "bias"):
                    merger = f"visual.deepstack_merger_list.{number}.{name}.{kind}"
                    stored[merger] = stored.pop(f"v.deepstack.{layer}.{part}.{kind}")
        return stored
