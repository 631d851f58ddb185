"""InternVL 3: tiles of an image, and a thumbnail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .family import Arrays, ImageFamily

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["InternVLForConditionalGeneration"]


class Family(ImageFamily):
    """Every tile has the same number of positions."""

    placeholder = "<IMG_CONTEXT>"

    def text(self, arrays: Arrays) -> str:
        count: int = self.config.get("image_seq_length", 256) * len(arrays["pixel_values"])
        return f"<img>{self.image_token * count}</img>"

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        for tile in range(len(tensors["pixel_values"])):
            yield {name: tensor[tile : tile + 1] for name, tensor in tensors.items()}
