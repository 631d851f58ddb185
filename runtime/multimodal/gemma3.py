"""Gemma 3: images of one size, whose positions see each other in both directions."""

from __future__ import annotations

from math import isqrt
from typing import Any, ClassVar

from .family import Arrays, ImageFamily

ARCHITECTURES = ["Gemma3ForConditionalGeneration"]


class Family(ImageFamily):
    """Each image has the same number of positions. Pan and scan is off, as by default."""

    placeholder = "<start_of_image>"
    token = "<image_soft_token>"
    # Checkpoints of older versions have one module more.
    tower_names: ClassVar = {r"^model\.": "", r"^vision_tower\.vision_model\.": "vision_tower."}
    sees_ahead = True

    def check(self, settings: dict[str, Any]) -> None:
        count: int = self.config.get("mm_tokens_per_image", 256)
        size, patch = (self.vision.get(name) for name in ("image_size", "patch_size"))
        side = isqrt(count)
        if side**2 != count or (size and patch and size // patch % side):
            raise ValueError(
                f"mm_tokens_per_image is {count}, but the vision tower has patches of {patch} "
                f"pixels in images of {size}"
            )

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        count: int = self.config.get("mm_tokens_per_image", 256)
        return f"\n\n{self.placeholder}{self.image_token * count}<end_of_image>\n\n"
