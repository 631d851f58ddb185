"""Idefics 3 and SmolVLM: tiles of an image, and the whole image after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from .family import Arrays, ImageFamily

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"]

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Family(ImageFamily):
    """Every tile has the same number of positions. Tokens name the tiles by row and column."""

    tensors: ClassVar = ("pixel_values", "pixel_attention_mask")

    def options(self, detail: str) -> dict[str, Any]:
        splits = {"do_image_splitting": False} if detail == "low" else {}
        return {"return_row_col_info": True, **splits}

    def text(self, arrays: Arrays) -> str:
        patches = self.vision.get("image_size", 224) // self.vision.get("patch_size", 32)
        tile = self.image_token * int(patches**2 / self.config.get("scale_factor", 2) ** 2)
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
