"""Mistral Small 3.1 and Ministral 3: images of any size (Pixtral's tower), row by row."""

from __future__ import annotations

from typing import Any, ClassVar

from .family import Arrays, ImageFamily, longest_side

ARCHITECTURES = ["Mistral3ForConditionalGeneration"]
_LONGEST = 1024  # Transformers' value of the longest side in pixels.


class Family(ImageFamily):
    """Tokens end the rows of an image and the image. They keep their embeddings."""

    placeholder = "[IMG]"
    tensors: ClassVar = ("pixel_values", "image_sizes")

    @property
    def merge(self) -> int:
        """Patches along each side of a position."""
        found: int = self.config.get("spatial_merge_size", 2)
        return found

    @property
    def _side(self) -> int:
        """Pixels along each side of a position."""
        patch: int = self.vision.get("patch_size", 16)
        return patch * self.merge

    def most_positions(self, settings: dict[str, Any]) -> int:
        return (longest_side(settings.get("size"), _LONGEST) // self._side + 1) ** 2

    def options(self, detail: str) -> dict[str, Any]:
        # preprocessor_config.json has the side of a patch.
        return {"patch_size": {"height": self._side, "width": self._side}}

    def text(self, arrays: Arrays) -> str:
        height, width = (int(pixels) // self._side for pixels in arrays["image_sizes"][0])
        rows = [self.image_token * width] * height
        return "[IMG_BREAK]".join(rows) + "[IMG_END]"

    def features(self, model: Any, part: Any, dtype: Any) -> list[Any]:
        sizes = part["image_sizes"]
        pixels = part["pixel_values"].to(dtype)
        found = model.get_image_features(pixels, image_sizes=sizes).pooler_output
        return [found[0]]
