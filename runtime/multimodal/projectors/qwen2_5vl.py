"""The vision tower of Qwen2.5-VL."""

from __future__ import annotations

from typing import Any, ClassVar

from . import qwen2vl

PROJECTOR_TYPES = ["qwen2.5vl_merger"]
_WINDOW = 112  # Pixels of a side of a window in the published models.


class OfFile(qwen2vl.OfFile):
    """That of Qwen2-VL with gated layers, most of which attend within windows."""

    architecture = "Qwen2_5_VLForConditionalGeneration"
    model_type = "qwen2_5_vl"
    text_type = "qwen2_5_vl_text"
    names: ClassVar = {
        **qwen2vl.OfFile.names,
        "v.blk.{}.ffn_gate": f"{qwen2vl.LAYER}.mlp.gate_proj",
        "v.blk.{}.ffn_up": f"{qwen2vl.LAYER}.mlp.up_proj",
        "v.blk.{}.ffn_down": f"{qwen2vl.LAYER}.mlp.down_proj",
    }

    def vision(self) -> dict[str, Any]:
        pattern: int = self.get("n_wa_pattern")
        return {
            **self.vision_of_both(),
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self.shapes["v.blk.0.ffn_up.weight"][0],
            "out_hidden_size": self.text_width,
            "window_size": self.get("window_size", _WINDOW),
            "fullatt_block_indexes": list(range(pattern - 1, self.num_layers, pattern)),
            "hidden_act": self.activation("silu"),
        }
