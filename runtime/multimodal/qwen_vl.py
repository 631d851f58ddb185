"""Qwen2-VL, Qwen2.5-VL and Qwen3.5: images of any size, and rotary positions of three kinds
(M-RoPE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..core.images import ImageInput
from .family import Arrays, ImageFamily, Rows, Turns

ARCHITECTURES = [
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
]  # fmt: skip
_LOW = 512 * 512  # Pixels of an image of `detail` low.
_PIXELS = 56 * 56, 28 * 28 * 1280  # Transformers' limits.
# Transformers' values of `mrope_section`.
_SECTIONS, _SECTIONS_OF_3, _SECTIONS_OF_3_5 = (16, 24, 24), (24, 20, 20), (11, 11, 10)


class Family(ImageFamily):
    """A position is a square of patches. It rotates by its frame, its row and its column."""

    placeholder = "<|image_pad|>"
    tensors: ClassVar = ("pixel_values", "image_grid_thw")
    sizes_are_pixels = True
    tower_names: ClassVar = {r"^model\.": ""}

    @property
    def _merge(self) -> int:
        size: int = self.vision.get("spatial_merge_size", 2)
        return size

    def check(self, settings: dict[str, Any]) -> None:
        least, most = self._pixels(settings)
        if least > most:
            raise ValueError(f"size lets an image have {most} pixels, but at least {least}")
        if (merge := settings.get("merge_size") or self._merge) != self._merge:
            raise ValueError(
                f"merge_size is {merge}, but the vision tower has a spatial_merge_size of "
                f"{self._merge}"
            )

    def most_positions(self, settings: dict[str, Any]) -> int:
        patch: int = self.vision.get("patch_size", 14)
        return self._pixels(settings)[1] // (patch * self._merge) ** 2

    def pixel_shape(self) -> tuple[int, ...]:
        patch = self.vision.get("patch_size")
        frames: int = self.vision.get("temporal_patch_size", 2)
        return () if patch is None else (3 * frames * patch**2,)

    @staticmethod
    def _pixels(settings: dict[str, Any]) -> tuple[int, int]:
        """Return how many pixels an image may have at least and at most."""
        size = settings.get("size")
        size = size if isinstance(size, dict) else {}
        return (
            settings.get("min_pixels") or size.get("shortest_edge") or _PIXELS[0],
            settings.get("max_pixels") or size.get("longest_edge") or _PIXELS[1],
        )

    def options(self, detail: str) -> dict[str, Any]:
        return {"max_pixels": _LOW} if detail == "low" else {}

    def text(self, arrays: Arrays) -> str:
        return self.image_token * int(arrays["image_grid_thw"].prod() // self._merge**2)

    def features(self, model: Any, part: Any, dtype: Any) -> list[Any]:
        found = model.get_image_features(part["pixel_values"].to(dtype), part["image_grid_thw"])
        deep = getattr(found, "deepstack_features", None) or []
        return [found.pooler_output[0], *(stage[0] for stage in deep)]

    def turns(self, num_prompt: int, images: Sequence[ImageInput]) -> Turns | None:
        turns = np.arange(num_prompt)
        for image in images:
            # An image takes as many positions as its longer side.
            height, width = (side // self._merge for side in self._grid(image)[1:])
            turns[image.end :] += max(height, width) - image.length
        return turns, int(turns[-1]) - num_prompt + 1

    def turned_rows(self, image: ImageInput, start: int) -> Rows:
        frames, height, width = self._grid(image)
        sides = frames, height // self._merge, width // self._merge
        return np.indices(sides).reshape(3, -1) + start

    def axes(self, half: int) -> npt.NDArray[np.int64]:
        text = self.config.get("text_config") or self.config
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        architecture = self.config["architectures"][0]
        if not architecture.startswith("Qwen3"):
            frames, rows, columns = rope.get("mrope_section") or _SECTIONS
            return np.repeat([0, 1, 2], [frames, rows, columns])[:half]
        # The three kinds take turns.
        sizes = _SECTIONS_OF_3_5 if "3_5" in architecture else _SECTIONS_OF_3
        sections = rope.get("mrope_section") or sizes
        axes = np.zeros(half, np.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes

    @staticmethod
    def _grid(image: ImageInput) -> list[int]:
        grid: list[int] = image.tensors["image_grid_thw"].array()[0].tolist()
        return grid
