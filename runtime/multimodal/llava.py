"""LLaVA 1.5: an image is resized and cropped to one size."""

from __future__ import annotations

from typing import ClassVar

from .family import Arrays, ImageFamily

ARCHITECTURES = ["LlavaForConditionalGeneration"]


class Family(ImageFamily):
    """Each patch of the vision tower is a position."""

    # Checkpoints of older versions have one module more.
    tower_names: ClassVar = {r"^model\.": "", r"^vision_tower\.vision_model\.": "vision_tower."}

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        height, width = arrays["pixel_values"].shape[-2:]
        patch: int = self.vision.get("patch_size", 14)
        # The tower of CLIP has a position of the class before the patches. Towers of other kinds
        # have none.
        patches = (height // patch) * (width // patch)
        has_class = self.vision.get("model_type") == "clip_vision_model"
        drops = self.config.get("vision_feature_select_strategy", "default") == "default"
        count: int = patches + has_class - drops
        return self.image_token * count
