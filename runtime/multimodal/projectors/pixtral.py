"""The vision tower of Pixtral and of Mistral Small 3.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ...files.gguf_reader import FastGGUFReader
from .projector import Projector, Stored

if TYPE_CHECKING:
    import torch

PROJECTOR_TYPES = ["pixtral"]
_LAYER = "vision_tower.transformer.layers.{}"
_PROJECTOR = "multi_modal_projector"


class OfFile(Projector):
    """A ViT with rotary positions of two axes. Mistral Small 3.1 merges squares of patches."""

    family = "pixtral"
    architecture = "LlavaForConditionalGeneration"
    model_type = "llava"
    text_type = "mistral"
    text_kinds = ("llama", "mistral3")
    output = ("mm.2.weight", 0)
    names: ClassVar = {
        "v.patch_embd": "vision_tower.patch_conv",
        "v.pre_ln": "vision_tower.ln_pre",
        "v.blk.{}.ln1": f"{_LAYER}.attention_norm",
        "v.blk.{}.ln2": f"{_LAYER}.ffn_norm",
        "v.blk.{}.attn_q": f"{_LAYER}.attention.q_proj",
        "v.blk.{}.attn_k": f"{_LAYER}.attention.k_proj",
        "v.blk.{}.attn_v": f"{_LAYER}.attention.v_proj",
        "v.blk.{}.attn_out": f"{_LAYER}.attention.o_proj",
        "v.blk.{}.ffn_gate": f"{_LAYER}.feed_forward.gate_proj",
        "v.blk.{}.ffn_up": f"{_LAYER}.feed_forward.up_proj",
        "v.blk.{}.ffn_down": f"{_LAYER}.feed_forward.down_proj",
        "mm.input_norm": f"{_PROJECTOR}.norm",
        "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
        "mm.1": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    }

    def __init__(self, reader: FastGGUFReader, text: FastGGUFReader) -> None:
        super().__init__(reader, text)
        self._merges = "mm.patch_merger.weight" in self.shapes
        if self._merges:
            self.family, self.model_type = "mistral3", "mistral3"
            self.architecture = "Mistral3ForConditionalGeneration"

    def config(self) -> dict[str, Any]:
        vision = {
            **self.vit(),
            "model_type": "pixtral",
            "intermediate_size": self.shapes["v.blk.0.ffn_up.weight"][0],
            "hidden_act": self.activation("gelu"),
        }
        common = {
            "vision_config": vision,
            "vision_feature_layer": -1,
            "multimodal_projector_bias": "mm.1.bias" in self.shapes,
        }
        if not self._merges:
            return {**common, "vision_feature_select_strategy": "full"}
        # The norm of the projector has the epsilon of the text model.
        eps = self.text("attention.layer_norm_rms_epsilon", 1e-5)
        merge = self.get("spatial_merge_size", 2)
        return {**common, "spatial_merge_size": merge, "text_config": {"rms_norm_eps": eps}}

    def processor(self) -> dict[str, Any]:
        patch: int = self.get("patch_size")
        return {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": self.get("image_size")},
            "patch_size": {"height": patch, "width": patch},
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import changed

        # The text model's own embedding of this token is used.
        stored.pop("v.token_embd.img_break", None)
        heads: int = self.get("attention.head_count")

        def turned(rows: torch.Tensor) -> torch.Tensor:
            pairs = rows.view(heads, -1, 2, rows.shape[1])
            return pairs.transpose(1, 2).reshape(rows.shape)

        # The converter sorts the rows of queries and keys into pairs.
        for layer in range(self.num_layers):
            for part in "qk":
                name = f"v.blk.{layer}.attn_{part}.weight"
                stored[name] = changed(stored[name], turned)
        return stored
