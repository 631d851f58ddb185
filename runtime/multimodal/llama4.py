"""Llama 4: tiles of an image, and the whole image after them.

Transformers' image processor needs torchvision, whose wheel fits one build of torch only. The same
is computed here by Pillow and numpy. Pixels differ from torchvision's by at most two of 256 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .family import Arrays, ImageFamily

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["Llama4ForConditionalGeneration"]
_TILE, _MOST_TILES = 336, 16  # Transformers' values.


class Family(ImageFamily):
    """Every tile has the same number of positions. Tokens end the columns and the rows of tiles."""

    placeholder = "<|image|>"
    token = "<|patch|>"

    def image_processor(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    def options(self, detail: str) -> dict[str, Any]:
        return {"max_patches": 1} if detail == "low" else {}

    def process(self, processor: Any, image: Any, detail: str) -> Arrays:
        settings = {**processor, **self.options(detail)}
        tile: int = settings.get("size", {}).get("height", _TILE)
        grows: bool = settings.get("resize_to_max_canvas", False)
        rows, columns = _grid(
            image.size, tile, settings.get("max_patches", _MOST_TILES), grows=grows
        )
        canvas = columns * tile, rows * tile
        # An image that is smaller than its canvas grows to the size of a tile at most.
        most = (
            canvas
            if grows
            else tuple(
                min(max(own, tile), whole) for own, whole in zip(image.size, canvas, strict=True)
            )
        )
        colours = _colours(settings)
        fitted = image.resize(_within(image.size, most), _bilinear())
        whole = np.zeros((*reversed(canvas), 3), np.uint8)
        whole[: fitted.height, : fitted.width] = np.asarray(fitted)
        tiles = (
            whole.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        )
        if rows * columns > 1:
            small = np.asarray(image.resize((tile, tile), _bilinear()))
            tiles = np.concatenate((tiles, small[None]))
        pixels = np.stack([colours[each][tiles[..., each]] for each in range(3)], axis=1)
        return {"pixel_values": pixels, "aspect_ratios": np.array([[rows, columns]])}

    def most_positions(self, settings: dict[str, Any]) -> int:
        size: int = self.vision.get("image_size", _TILE)
        most: int = settings.get("max_patches") or _MOST_TILES
        return (most + 1) * self._of_tile(size, size)

    def _of_tile(self, height: int, width: int) -> int:
        """Return the positions of a tile."""
        patch: int = self.vision.get("patch_size", 14)
        ratio: float = self.vision.get("pixel_shuffle_ratio", 0.5)
        return int((height // patch) * (width // patch) * ratio**2)

    def pixel_shape(self) -> tuple[int, ...]:
        return self.square()

    def text(self, arrays: Arrays) -> str:
        tile = self.image_token * self._of_tile(*arrays["pixel_values"].shape[-2:])
        rows, columns = map(int, arrays["aspect_ratios"][0])
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        tiles = row * rows if rows * columns > 1 else ""
        return f"<|image_start|>{tiles}{self.placeholder}{tile}<|image_end|>"

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for tile in range(len(tensors["pixel_values"])):
            yield {"pixel_values": tensors["pixel_values"][tile : tile + 1]}

    def features(self, model: Any, part: Any, dtype: Any) -> list[Any]:
        found = model.vision_model(part["pixel_values"].to(dtype)).last_hidden_state
        return [model.multi_modal_projector(found)]


def _bilinear() -> Any:
    from PIL import Image

    return Image.Resampling.BILINEAR


def _grid(size: tuple[int, int], tile: int, most: int, *, grows: bool) -> tuple[int, int]:
    """Return the rows and columns of at most `most` tiles for an image of `size` (width, height).

    The image should shrink as little as possible, and then be surrounded by little padding. If
    `grows`, it should grow as much as possible.
    """
    width, height = size
    found: dict[tuple[int, int], np.float32] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                # Transformers compares these numbers in float32.
                scales = np.float32(columns * tile / width), np.float32(rows * tile / height)
                found[rows, columns] = min(scales)
    growing = [scale for scale in found.values() if scale >= 1]
    shrinks_least = max(found.values())
    chosen = (max(growing) if grows else min(growing)) if growing else shrinks_least
    fitting = [grid for grid, scale in found.items() if scale == chosen]
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def _within(size: tuple[int, int], most: tuple[int, ...]) -> tuple[int, int]:
    """Return the largest size (width, height) within `most` that keeps the proportions."""
    width, height = size
    across, down = most[0] / width, most[1] / height
    if across < down:
        return most[0], max(1, min(int(height * across), most[1]))
    return max(1, min(int(width * down), most[0])), most[1]


def _colours(settings: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Return the numbers [3, 256] for the values of each colour, rounded to bfloat16 as in
    training.
    """
    means = np.array(settings.get("image_mean", [0.5] * 3), np.float32)[:, None]
    deviations = np.array(settings.get("image_std", [0.5] * 3), np.float32)[:, None]
    scale = np.float32(settings.get("rescale_factor", 1 / 255))
    values = _rounded(np.arange(256, dtype=np.float32)[None] * scale)
    return _rounded(_rounded(values - _rounded(means)) / _rounded(deviations))


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return numbers rounded to bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)
