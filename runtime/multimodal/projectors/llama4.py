"""The vision tower of Llama 4."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, Stored

PROJECTOR_TYPES = ["llama4"]
_TOWER = "vision_model"
_LAYER = f"{_TOWER}.model.layers.{{}}"
_ADAPTER = f"{_TOWER}.vision_adapter.mlp"
_TILES = 16  # The most tiles of an image of the published models, which files do not state.


class OfFile(Projector):
    """A ViT with rotary positions, and an adapter that makes one position of squares of patches."""

    family = "llama4"
    architecture = "Llama4ForConditionalGeneration"
    model_type = "llama4"
    text_type = "llama4_text"
    text_kinds = ("llama4",)
    output = ("mm.model.fc.weight", 0)
    names: ClassVar = {
        "v.patch_embd": f"{_TOWER}.patch_embedding.linear",
        "v.pre_ln": f"{_TOWER}.layernorm_pre",
        "v.post_ln": f"{_TOWER}.layernorm_post",
        "v.blk.{}.ln1": f"{_LAYER}.input_layernorm",
        "v.blk.{}.ln2": f"{_LAYER}.post_attention_layernorm",
        # Newer converters give this norm the name of another one, of Gemma 4.
        "v.blk.{}.attn_post_norm": f"{_LAYER}.post_attention_layernorm",
        "v.blk.{}.attn_q": f"{_LAYER}.self_attn.q_proj",
        "v.blk.{}.attn_k": f"{_LAYER}.self_attn.k_proj",
        "v.blk.{}.attn_v": f"{_LAYER}.self_attn.v_proj",
        "v.blk.{}.attn_out": f"{_LAYER}.self_attn.o_proj",
        "v.blk.{}.ffn_up": f"{_LAYER}.mlp.fc1",
        "v.blk.{}.ffn_down": f"{_LAYER}.mlp.fc2",
        "mm.model.mlp.1": f"{_ADAPTER}.fc1",
        "mm.model.mlp.2": f"{_ADAPTER}.fc2",
        "mm.model.fc": "multi_modal_projector.linear_1",
    }

    def config(self) -> dict[str, Any]:
        vision = self.vit()
        return {
            "vision_config": {
                **vision,
                "norm_eps": vision["layer_norm_eps"],
                "pixel_shuffle_ratio": 1 / self.get("projector.scale_factor", 2),
                "projector_input_dim": self.shapes["mm.model.mlp.1.weight"][0],
                "projector_output_dim": self.shapes["mm.model.mlp.2.weight"][0],
                "vision_output_dim": self.shapes["mm.model.fc.weight"][1],
            }
        }

    def processor(self) -> dict[str, Any]:
        size: int = self.get("image_size")
        return {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": size, "width": size},
            "max_patches": self.get("preproc_max_tiles", _TILES),
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        stored[f"{_TOWER}.class_embedding"] = stored.pop("v.class_embd")
        stored[f"{_TOWER}.positional_embedding_vlm"] = stored.pop("v.position_embd.weight")
        return stored
