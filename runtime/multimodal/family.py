"""What a family of models that take images differs in.

A family is a file of this room with its `ARCHITECTURES` (`config.multimodal_registry`) and a class:

    class Family(ImageFamily):
        placeholder = "<image>"                    # as chat templates write an image
        def text(self, tensors): ...               # what replaces the placeholder
        tensor_names = {"pixel_values": "pixel_values"}

The process that decodes images uses `text`, `options` and `placeholder`. The engine uses the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


class ImageFamily:
    """The base class of families. `config` is the content of config.json."""

    # The text that chat templates write for an image.
    placeholder: ClassVar[str] = "<image>"
    # The token whose positions the encoder's output replaces. None: `placeholder` is the token.
    token: ClassVar[str | None] = None
    # What the image processor returns, and the encoder reads. Other results are not sent.
    tensors: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.vision: dict[str, Any] = config["vision_config"]

    @property
    def image_token(self) -> str:
        """The token whose positions the encoder's output replaces."""
        return self.token or self.placeholder

    def options(self, detail: str) -> dict[str, Any]:
        """Return arguments of the image processor for OpenAI's `detail`."""
        return {}

    def text(self, arrays: Arrays) -> str:
        """Return what replaces the placeholder of an image in the prompt.

        `arrays` is all that the image processor returned for the image.
        """
        raise NotImplementedError
