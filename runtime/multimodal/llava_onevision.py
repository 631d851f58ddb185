"""LLaVA-OneVision: the whole image and tiles of it, without the padding of the tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .family import Arrays, ImageFamily

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["LlavaOnevisionForConditionalGeneration"]

# Sides of 1 to 6 tiles of 384 pixels.
_SIDES = range(384, 7 * 384, 384)
_ASPECT = "anyres_max_"
_MOST = 1.1  # Times as many positions along a side as allowed, above which tiles are shrunk.


class Family(ImageFamily):
    """An image of a prompt with one image has tiles. With several, each image is one tile.

    A position ends each row of the joined tiles.
    """

    # The default of `image_grid_pinpoints`.
    grids: ClassVar = [[height, width] for height in _SIDES for width in _SIDES]
    tensors: ClassVar = ("pixel_values", "image_sizes")
    # Published checkpoints have one module more, and another place of the text model.
    tower_names: ClassVar = {r"^model\.": "", r"^vision_tower\.vision_model\.": "vision_tower."}

    def check(self, settings: dict[str, Any]) -> None:
        own, grids = settings.get("image_grid_pinpoints"), self._grids
        if own is not None and sorted(own) != sorted(grids):
            raise ValueError(
                "image_grid_pinpoints of the image processor are not those of the model"
            )
        tile: int = self.vision["image_size"]
        if any(side % tile for grid in grids for side in grid):
            raise ValueError(
                f"image_grid_pinpoints have sides that are no whole numbers of tiles of {tile}"
            )
        if not 1 <= self.vision["patch_size"] <= tile:
            raise ValueError(f"patch_size is larger than a tile of {tile} pixels")

    def most_positions(self, settings: dict[str, Any]) -> int:
        patch: int = self.vision["patch_size"]
        return max((height // patch) * (width // patch + 1) for height, width in self._grids)

    @property
    def _grids(self) -> list[list[int]]:
        found: list[list[int]] = self.config.get("image_grid_pinpoints") or self.grids
        return found

    def detail(self, asked: str, count: int) -> str:
        return asked if count == 1 else "low"

    def process(self, processor: Any, image: Any, detail: str) -> Arrays:
        if detail != "low":
            return super().process(processor, image, detail)
        # The processor makes one tile of each image of a prompt with several.
        found = processor(images=[[image, image]], return_tensors="np")
        return {name: np.asarray(value)[:1] for name, value in found.items()}

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        if arrays["pixel_values"].shape[1] == 1:
            return self.image_token * (self.of_tile + 1)
        rows, columns = self._grid(*map(int, arrays["image_sizes"][0]))
        return self.image_token * (self.of_tile + rows * (columns + 1))

    @property
    def of_tile(self) -> int:
        """Positions of the whole image, which is one tile."""
        found: int = (self.vision["image_size"] // self.vision["patch_size"]) ** 2
        return found

    @property
    def most_tiles(self) -> int | None:
        """Joined tiles are shrunk to the positions of this number of tiles. None: they are not."""
        return int(self._aspect.removeprefix(_ASPECT))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of positions of the joined tiles of an image."""
        from transformers.image_processing_utils import select_best_resolution

        patch: int = self.vision["patch_size"]
        tile: int = self.vision["image_size"]
        side = tile // patch
        rows, columns = (
            pixels // tile * side for pixels in select_best_resolution((height, width), self._grids)
        )
        # Padding is left out.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self.most_tiles is not None:
            ratio = sqrt(rows * columns / (self.most_tiles * side**2))
            if ratio > _MOST:
                rows, columns = int(rows // ratio), int(columns // ratio)
        return rows, columns

    @property
    def _aspect(self) -> str:
        aspect: str = self.config.get("vision_aspect_ratio", f"{_ASPECT}9")
        return aspect

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        tiles = tensors["pixel_values"][0]
        for tile in range(len(tiles)):
            yield {**tensors, "pixel_values": tiles[tile : tile + 1]}

    def features(self, model: Any, part: Any, dtype: Any) -> list[Any]:
        # The method takes a tile for an image of a prompt with several, and appends the end of a
        # row.
        found = model.get_image_features(
            part["pixel_values"].to(dtype), part["image_sizes"], batch_num_images=[2]
        )
        return [found.pooler_output[0][:-1]]

    def joined(
        self, model: Any, tensors: dict[str, torch.Tensor], parts: Sequence[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        import torch

        tiles = torch.stack([stages[0] for stages in parts])
        found, _ = model.pack_image_features([tiles], tensors["image_sizes"], *self.packing(model))
        return [found[0]]

    def packing(self, model: Any) -> tuple[Any, ...]:
        """Return the last arguments of transformers' `pack_image_features`."""
        return model.image_newline, self._aspect
