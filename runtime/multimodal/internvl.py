"""InternVL 3: tiles of an image, and a thumbnail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .family import Arrays, ImageFamily

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["InternVLForConditionalGeneration"]
_MOST_TILES = 12  # Transformers' value of `max_patches`.


class Family(ImageFamily):
    """Every tile has the same number of positions."""

    placeholder = "<IMG_CONTEXT>"

    @property
    def _of_tile(self) -> int:
        """Positions of a tile."""
        count: int = self.config.get("image_seq_length", 256)
        return count

    def check(self, settings: dict[str, Any]) -> None:
        least, most = settings.get("min_patches") or 1, settings.get("max_patches") or _MOST_TILES
        if least > most:
            raise ValueError(f"min_patches is {least}, more than the {most} of max_patches")
        size, patch = self.square(), self.vision.get("patch_size")
        if not size or not patch:
            return
        patches = patch if isinstance(patch, list) else [patch] * 2
        ratio: float = self.config.get("downsample_ratio", 0.5)
        rows, columns = (
            int(side // each * ratio) for side, each in zip(size, patches, strict=True)
        )
        if rows * columns != self._of_tile:
            raise ValueError(
                f"image_seq_length is {self._of_tile}, but the vision tower makes {rows} x "
                f"{columns} positions of a tile"
            )

    def most_positions(self, settings: dict[str, Any]) -> int:
        return ((settings.get("max_patches") or _MOST_TILES) + 1) * self._of_tile

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        count = self._of_tile * len(arrays["pixel_values"])
        return f"<img>{self.image_token * count}</img>"

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for tile in range(len(tensors["pixel_values"])):
            yield {name: tensor[tile : tile + 1] for name, tensor in tensors.items()}
