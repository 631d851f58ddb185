"""Encodes one image in pieces, so that steps run between them."""

from __future__ import annotations

import torch

from ..core.images import ImageInput
from .encodings import Stages
from .family import ImageFamily
from .pieces import Pieces
from .source import ImageSource
from .tower import Tower

_SIDE = 4096  # Pixels of a side of a large image.


@torch.inference_mode()
def encode_largest(tower: Tower, source: ImageSource, dtype: torch.dtype) -> None:
    """Encode the first part of a large image, for the memory that it takes."""
    from PIL import Image

    family, image = source.family, Image.new("RGB", (_SIDE, _SIDE))
    arrays = family.process(source.image_processor(), image, "auto")
    device = next(tower.parameters()).device
    tensors = {
        name: torch.from_numpy(arrays[name]).to(device) for name in family.tensors if name in arrays
    }
    family.features(tower.model, next(iter(family.parts(tensors))), dtype)


def encode_job(
    tower: Tower, family: ImageFamily, dtype: torch.dtype, rows: int | None, image: ImageInput
) -> Pieces[Stages]:
    """Return the call that encodes an image. A piece has `rows` rows of a layer (`Pieces`)."""

    def encode() -> Stages:
        device = next(tower.parameters()).device
        tensors = {
            name: torch.from_numpy(tensor.array().copy()).to(device)
            for name, tensor in image.tensors.items()
        }
        parts = [
            [stage.flatten(0, -2) for stage in family.features(tower.model, part, dtype)]
            for part in family.parts(tensors)
        ]
        stages = family.joined(tower.model, tensors, parts)
        made = {len(stage) for stage in stages}
        if made != {image.num_tokens}:
            raise ValueError(
                f"the encoder made {sorted(made)} rows for the {image.num_tokens} positions of an "
                "image"
            )
        return stages

    return Pieces(encode, rows)
