"""Tiles of images of Llama 4, without torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from piecework.runtime.multimodal.llama4 import Family

FAMILY = Family({"vision_config": {"patch_size": 8, "pixel_shuffle_ratio": 0.5}})


@pytest.mark.parametrize(
    ("size", "most", "grows", "grid", "fitted"),
    [
        ((48, 40), 4, False, [2, 2], (48, 40)),
        ((30, 90), 4, False, [3, 1], (30, 90)),
        ((300, 20), 16, False, [1, 10], (300, 20)),
        ((33, 33), 16, True, [4, 4], (128, 128)),
        ((500, 400), 5, False, [2, 2], (64, 51)),
        ((20, 10), 16, False, [1, 1], (32, 16)),
    ],
)
def test_the_grid_is_that_of_transformers(
    size: tuple[int, int], most: int, grows: bool, grid: list[int], fitted: tuple[int, int]
) -> None:
    """The numbers are those of transformers 5.24 with torchvision 0.28."""
    settings = {
        "size": {"height": 32, "width": 32},
        "max_patches": most,
        "resize_to_max_canvas": grows,
    }
    arrays = FAMILY.process(settings, Image.new("RGB", size, (255, 255, 255)), "auto")
    assert arrays["aspect_ratios"].tolist() == [grid]
    rows, columns = grid
    tiles = arrays["pixel_values"]
    assert len(tiles) == rows * columns + (rows * columns > 1)
    white = tiles[: rows * columns, 0].reshape(rows, columns, 32, 32) > 0.9
    whole = white.swapaxes(1, 2).reshape(rows * 32, columns * 32)
    assert (int(whole.any(0).sum()), int(whole.any(1).sum())) == fitted
    assert FAMILY.text(arrays).count("<|patch|>") == len(tiles) * 4


def test_colours_are_rounded_as_in_training() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.3] * 3}
    arrays = FAMILY.process(settings, Image.fromarray(grey).convert("RGB"), "low")
    mean, deviation = (torch.tensor(value, dtype=torch.bfloat16) for value in (0.3, 0.5))
    wanted = torch.from_numpy(grey).to(torch.bfloat16) * (1 / 255)
    wanted = (wanted - mean) / deviation
    assert torch.equal(torch.from_numpy(arrays["pixel_values"])[0, 1], wanted.float())
