"""The vision tower of InternVL 2.5 and 3."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, Stored

PROJECTOR_TYPES = ["internvl"]
_TOWER = "vision_tower"
_LAYER = f"{_TOWER}.encoder.layer.{{}}"
_TILES = 12  # The most tiles of an image, if the file does not say how many.


class OfFile(Projector):
    """A ViT, and a projector that makes one position of a square of patches."""

    family = "internvl"
    architecture = "InternVLForConditionalGeneration"
    model_type = "internvl"
    text_type = "qwen2"
    text_kinds = ("qwen2",)
    output = ("mm.model.mlp.3.weight", 0)
    names: ClassVar = {
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
        "v.blk.{}.ln1": f"{_LAYER}.layernorm_before",
        "v.blk.{}.ln2": f"{_LAYER}.layernorm_after",
        "v.blk.{}.attn_q": f"{_LAYER}.attention.q_proj",
        "v.blk.{}.attn_k": f"{_LAYER}.attention.k_proj",
        "v.blk.{}.attn_v": f"{_LAYER}.attention.v_proj",
        "v.blk.{}.attn_q_norm": f"{_LAYER}.attention.q_norm",
        "v.blk.{}.attn_k_norm": f"{_LAYER}.attention.k_norm",
        "v.blk.{}.attn_out": f"{_LAYER}.attention.projection_layer",
        "v.blk.{}.ffn_up": f"{_LAYER}.mlp.fc1",
        "v.blk.{}.ffn_down": f"{_LAYER}.mlp.fc2",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    }

    def config(self) -> dict[str, Any]:
        size, patch = self.get("image_size"), self.get("patch_size")
        scale: int = self.get("projector.scale_factor", 2)
        vision = {
            **self.vit(),
            "image_size": [size, size],
            "patch_size": [patch, patch],
            "hidden_act": self.activation("gelu"),
            "attention_bias": "v.blk.0.attn_q.bias" in self.shapes,
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in self.shapes,
            "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in self.shapes else "rms_norm",
        }
        return {
            "vision_config": vision,
            "downsample_ratio": 1 / scale,
            "image_seq_length": (size // patch // scale) ** 2,
        }

    def processor(self) -> dict[str, Any]:
        size: int = self.get("image_size")
        return {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": size, "width": size},
            "crop_to_patches": True,
            "min_patches": self.get("preproc_min_tiles", 1),
            "max_patches": self.get("preproc_max_tiles", _TILES),
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import changed

        width: int = self.get("embedding_length")
        places = {
            "v.class_embd": f"{_TOWER}.embeddings.cls_token",
            "v.position_embd.weight": f"{_TOWER}.embeddings.position_embeddings",
        }
        for name, place in places.items():
            stored[place] = changed(stored.pop(name), lambda values: values.view(1, -1, width))
        for layer in range(self.num_layers):
            for number in (1, 2):
                scale = stored.pop(f"v.blk.{layer}.ls{number}.weight")
                stored[f"{_LAYER.format(layer)}.lambda_{number}"] = scale
        return stored
