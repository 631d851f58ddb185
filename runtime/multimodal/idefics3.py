"""Idefics 3 and SmolVLM: tiles of an image, and the whole image after them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from .family import Arrays, ImageFamily, longest_side

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"]

_TILE, _MOST_SIDE = 364, 4096  # Pixels of transformers' image processor.
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Family(ImageFamily):
    """Every tile has the same number of positions. Tokens name the tiles by row and column."""

    tensors: ClassVar = ("pixel_values", "pixel_attention_mask")

    def options(self, detail: str) -> dict[str, Any]:
        splits = {"do_image_splitting": False} if detail == "low" else {}
        return {"return_row_col_info": True, **splits}

    @property
    def _of_tile(self) -> int:
        """Positions of a tile."""
        patches = self.vision.get("image_size", 224) // self.vision.get("patch_size", 32)
        return int(patches**2 / self.config.get("scale_factor", 2) ** 2)

    def most_positions(self, settings: dict[str, Any]) -> int:
        longest = longest_side(settings.get("size"), 4 * _TILE)
        tile = longest_side(settings.get("max_image_size"), _TILE)
        return (ceil(min(longest, _MOST_SIDE) / tile) ** 2 + 1) * max(1, self._of_tile)

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        tile = self.image_token * self._of_tile
        rows, columns = int(arrays["rows"][0][0]), int(arrays["cols"][0][0])
        whole = f"{_AROUND}{_WHOLE}{tile}{_AROUND}"
        if not rows and not columns:
            return whole
        split = "".join(
            "".join(f"{_AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        )
        return f"{split}\n{whole}"

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for tile in range(tensors["pixel_values"].shape[1]):
            yield {name: tensor[:, tile : tile + 1] for name, tensor in tensors.items()}
