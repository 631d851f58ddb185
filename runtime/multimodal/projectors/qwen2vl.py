"""The vision tower of Qwen2-VL."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, Stored

PROJECTOR_TYPES = ["qwen2vl_merger"]
LAYER = "visual.blocks.{}"


class OfFile(Projector):
    """A ViT with rotary positions, and a merger that makes one position of four patches."""

    family = "qwen_vl"
    architecture = "Qwen2VLForConditionalGeneration"
    model_type = "qwen2_vl"
    text_type = "qwen2_vl_text"
    text_kinds: ClassVar[tuple[str, ...]] = ("qwen2vl",)
    output = ("mm.2.weight", 0)
    # Pixels of an image in the published models.
    pixels: ClassVar[tuple[int, int]] = (3136, 12845056)
    # Frequencies for the frames, rows and columns in the published models.
    sections: tuple[int, ...] = (16, 24, 24, 0)
    names: ClassVar = {
        "v.patch_embd": "visual.patch_embed.proj",
        "v.post_ln": "visual.merger.ln_q",
        "v.blk.{}.ln1": f"{LAYER}.norm1",
        "v.blk.{}.ln2": f"{LAYER}.norm2",
        "v.blk.{}.attn_qkv": f"{LAYER}.attn.qkv",
        "v.blk.{}.attn_out": f"{LAYER}.attn.proj",
        "v.blk.{}.ffn_up": f"{LAYER}.mlp.fc1",
        "v.blk.{}.ffn_down": f"{LAYER}.mlp.fc2",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    }

    def vision(self) -> dict[str, Any]:
        """Return `vision_config`."""
        # Old converters write 0 for the width of the layers' middle, so the tensor tells it.
        width: int = self.get("embedding_length")
        middle = self.shapes["v.blk.0.ffn_up.weight"][0]
        return {
            **self.vision_of_both(),
            "embed_dim": width,
            "hidden_size": self.text_width,
            "mlp_ratio": middle // width,
            "hidden_act": self.activation("quick_gelu"),
        }

    def vision_of_both(self) -> dict[str, Any]:
        """Return what `vision_config` has of Qwen2-VL and of Qwen2.5-VL."""
        return {
            "depth": self.num_layers,
            "num_heads": self.get("attention.head_count"),
            "patch_size": self.get("patch_size"),
            "spatial_merge_size": self.get("spatial_merge_size", 2),
            "temporal_patch_size": 2,
        }

    def config(self) -> dict[str, Any]:
        *sections, _ = self.text("rope.dimension_sections", list(self.sections))
        rope = {"rope_type": "default", "mrope_section": sections}
        return {"vision_config": self.vision(), "text_config": {"rope_parameters": rope}}

    def processor(self) -> dict[str, Any]:
        least, most = self.pixels
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self.get("patch_size"),
            "temporal_patch_size": 2,
            "merge_size": self.get("spatial_merge_size", 2),
            "size": {
                "shortest_edge": self.get("image_min_pixels", least),
                "longest_edge": self.get("image_max_pixels", most),
            },
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import changed, joined

        # The converter cuts the projections of attention apart, and the convolution into frames.
        for layer in range(self.num_layers):
            for kind in ("weight", "bias"):
                names = [f"v.blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
                if names[0] in stored:
                    stored[f"v.blk.{layer}.attn_qkv.{kind}"] = joined(
                        [stored.pop(name) for name in names]
                    )
        first = "v.patch_embd.weight"
        frames = [
            changed(stored.pop(name), lambda values: values.unsqueeze(2))
            for name in (first, f"{first}.1")
        ]
        stored[first] = joined(frames, 2)
        return stored
