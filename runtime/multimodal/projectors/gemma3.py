"""The vision tower of Gemma 3."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, Stored, vit_names

PROJECTOR_TYPES = ["gemma3"]
_SIDE = 4  # Patches that become one position, along each side.


class OfFile(Projector):
    """SigLIP, and a projector that pools squares of patches."""

    family = "gemma3"
    architecture = "Gemma3ForConditionalGeneration"
    model_type = "gemma3"
    text_type = "gemma3_text"
    text_kinds = ("gemma3",)
    output = ("mm.input_projection.weight", 1)
    names: ClassVar = {
        **vit_names("vision_tower"),
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    }

    def config(self) -> dict[str, Any]:
        vision = {**self.vit(), "model_type": "siglip_vision_model", "vision_use_head": False}
        side = (
            vision["image_size"]
            // vision["patch_size"]
            // self.get("projector.scale_factor", _SIDE)
        )
        return {"vision_config": vision, "mm_tokens_per_image": side**2}

    def processor(self) -> dict[str, Any]:
        size: int = self.get("image_size")
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": size, "width": size},
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import changed

        # The converter adds 1 to this norm, and gives the projection another name.
        norm, projection = "mm.soft_emb_norm.weight", "mm.input_projection.weight"
        stored[norm] = changed(stored[norm], lambda values: values - 1)
        stored["multi_modal_projector.mm_input_projection_weight"] = stored.pop(projection)
        return stored
