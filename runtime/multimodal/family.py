"""What a family of models that take images differs in.

A family is a file of this room with its `ARCHITECTURES` (`config.multimodal_registry`) and a class:

    class Family(ImageFamily):
        placeholder = "<image>"                      # as chat templates write an image
        def text(self, arrays): ...                  # what replaces the placeholder

The process that decodes images uses `text`, `options` and `placeholder`. The engine uses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..core.images import ImageInput

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.int64]
Turns = tuple[npt.NDArray[np.int64], int]


class ImageFamily:
    """The base class of families. `config` is the content of config.json."""

    # The text that chat templates write for an image.
    placeholder: ClassVar[str] = "<image>"
    # The token whose positions the encoder's output replaces. None: `placeholder` is the token.
    token: ClassVar[str | None] = None
    # What the image processor returns, and the encoder reads. Other results are not sent.
    tensors: ClassVar[tuple[str, ...]] = ("pixel_values",)
    # Whether the positions of an image see each other in both directions.
    sees_ahead: bool = False
    # The id that the engine gets for positions of images. None: that of the token.
    sent_id: int | None = None
    # Whether `size` of the image processor counts pixels. It is sides otherwise.
    sizes_are_pixels: ClassVar[bool] = False
    # Names of tensors in checkpoints, as regular expressions, and those of transformers' modules.
    tower_names: ClassVar[Mapping[str, str]] = {r"^model\.": ""}

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.vision: dict[str, Any] = config["vision_config"]
        if not isinstance(self.vision, dict):
            raise ValueError("vision_config of config.json is no JSON object")

    @property
    def image_token(self) -> str:
        """The token whose positions the encoder's output replaces."""
        return self.token or self.placeholder

    def detail(self, asked: str, count: int) -> str:
        """Return how an image is processed whose request asks for a `detail`.

        `count` is the number of images of the prompt.
        """
        return asked

    def check(self, settings: dict[str, Any]) -> None:
        """Raise `ValueError` if settings of the image processor do not fit each other, or not the
        vision tower. `settings.check_settings` has checked each by itself.
        """

    def most_positions(self, settings: dict[str, Any]) -> int:
        """Return an upper bound of the positions of an image. 0: the settings do not limit them,
        or the number is the same for all images.
        """
        return 0

    def pixel_shape(self) -> tuple[int, ...]:
        """Return the last dimensions of `tensors[0]` that the vision tower reads. (): any."""
        return ()

    def square(self) -> tuple[int, ...]:
        """Return `pixel_shape` of a tower that reads images of one size."""
        size = self.vision.get("image_size", ())
        return tuple(size) if isinstance(size, list) else (size, size) if size else ()

    def image_processor(self, settings: dict[str, Any]) -> Any:
        """Return what `process` gets for preprocessor_config.json. None: transformers' image
        processor.
        """
        return None

    def options(self, detail: str) -> dict[str, Any]:
        """Return arguments of the image processor for OpenAI's `detail`."""
        return {}

    def process(self, processor: Any, image: Any, detail: str) -> Arrays:
        """Return what transformers' image processor makes of an image."""
        found = processor(images=[image], return_tensors="np", **self.options(detail))
        return {name: np.asarray(value) for name, value in found.items()}

    def text(self, arrays: Arrays) -> str:
        """Return what replaces the placeholder of an image in the prompt.

        `arrays` is all that the image processor returned for the image.
        """
        raise NotImplementedError

    def tower_name(self, name: str) -> str:
        """Return the name of a tensor of a checkpoint in transformers' model."""
        for pattern, replacement in self.tower_names.items():
            name = re.sub(pattern, replacement, name)
        return name

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parts of an image that can be encoded one after another, such as tiles."""
        yield tensors

    def features(
        self, model: Any, part: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the stages (`StepImages`) of a part, tensors [..., hidden].

        `model` is that of transformers without its text model.
        """
        part = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in part.items()
        }
        found = model.get_image_features(**part).pooler_output
        return [found if not isinstance(found, list | tuple) else _joined(found)]

    def joined(
        self, model: Any, tensors: dict[str, torch.Tensor], parts: Sequence[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the stages of an image from those of its parts, tensors [positions, hidden]."""
        import torch

        return [torch.cat(stage) for stage in zip(*parts, strict=True)]

    def turns(self, num_prompt: int, images: Sequence[ImageInput]) -> Turns | None:
        """Return the positions by which the tokens of a prompt are rotated, and what is added to
        later positions (`Request.turns`). None: all are the positions of the text.
        """
        return None

    def turned_rows(self, image: ImageInput, start: int) -> Rows:
        """Return the positions [axes, positions] by which an image rotates whose first position
        would be `start`. Only of families with `turns`.
        """
        raise NotImplementedError

    def axes(self, half: int) -> npt.NDArray[np.int64]:
        """Return which axis of `turned_rows` each of `half` frequencies reads."""
        raise NotImplementedError


def longest_side(size: Any, default: int) -> int:
    """Return the longest side in pixels that a size of an image processor's settings names."""
    sides = size.values() if isinstance(size, dict) else [size]
    return max((int(side) for side in sides if side is not None), default=default)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([part.flatten(0, -2) for part in parts])
