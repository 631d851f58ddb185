"""An image of a request: where its positions are in the prompt, and what its encoder reads.

No torch is imported here, so the web process may use this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b, shake_128
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = np.dtype(np.int64).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTensor:
    """A tensor as an image processor made it.

    `dtype` is the name of a numpy dtype ("float32", "int64", "bool"). `data` are its bytes, in
    row-major order and little-endian. If there are `levels`, `data` has a byte for each number: its
    index in the levels. Messages are a quarter as long then.
    """

    dtype: str
    shape: list[int]
    data: bytes
    levels: bytes = b""

    @staticmethod
    def of(array: npt.NDArray[Any]) -> ImageTensor:
        """Return the tensor of a numpy array."""
        stored, levels = _by_levels(array) or (array, np.empty(0))
        return ImageTensor(
            dtype=array.dtype.name,
            shape=list(array.shape),
            data=np.ascontiguousarray(stored).tobytes(),
            levels=levels.tobytes(),
        )

    def array(self) -> npt.NDArray[Any]:
        """Return the tensor as a numpy array, which must not be written to."""
        if not self.levels:
            return np.frombuffer(self.data, self.dtype).reshape(self.shape)
        indices = np.frombuffer(self.data, np.uint8).reshape(self.shape)
        return np.frombuffer(self.levels, self.dtype)[indices]


def _by_levels(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return indices and levels if the numbers are colours of 8 bits, scaled to -1 to 1.

    No bit of a number is lost. Return None for other numbers.
    """
    if array.dtype != np.float32 or not array.size:
        return None
    array = np.ascontiguousarray(array)
    places = np.rint((array + 1) * 127.5)
    if not (places.min() >= 0 and places.max() <= 255):  # Also of numbers that are not finite.
        return None
    indices = places.astype(np.uint8)
    levels = np.zeros(256, np.float32)
    levels[indices] = array
    # Compared as bits: 0.0 equals -0.0.
    same = np.array_equal(levels[indices].view(np.uint32), array.view(np.uint32))
    return (indices, levels) if same else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One image of a prompt.

    Attributes:
        start: Index of the image's first position in the ids of the prompt.
        length: Number of positions from `start` until after the last one. The ids between two
            positions of the image, such as the ends of its rows, count too.
        rows: Offsets from `start` of the positions that the encoder's output replaces, in order.
            Empty: all of them.
        digest: 16 bytes that are equal only for equal `tensors`. They depend on the pixels and on
            the processor's settings.
        tensors: What the encoder reads, by the names of the processor ("pixel_values").
    """

    start: int
    length: int
    digest: bytes
    tensors: dict[str, ImageTensor]
    rows: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index after the image's last position."""
        return self.start + self.length

    @property
    def num_tokens(self) -> int:
        """Number of positions that the encoder's output replaces."""
        return len(self.rows) or self.length

    def names(self) -> npt.NDArray[np.int64]:
        """Return the ids [length] by which the prefix cache knows the image's positions.

        They are negative, so no token has such an id, and they follow from the digest alone.
        """
        drawn = shake_128(self.digest).digest(_BYTES * self.length)
        return np.frombuffer(drawn, "<i8").astype(np.int64) | np.iinfo(np.int64).min


def named(ids: Iterable[int], images: Iterable[ImageInput]) -> npt.NDArray[np.int64]:
    """Return ids in which positions of images have the names of their image."""
    names = np.array(list(ids), np.int64)
    for image in images:
        names[image.start : image.end] = image.names()
    return names


def digest_of(tensors: dict[str, ImageTensor]) -> bytes:
    """Return `ImageInput.digest` of these tensors."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(tensor.levels + tensor.data)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """The bytes of a PNG, JPEG, WebP or GIF file, as a client sent them.

    `detail` is OpenAI's: "low", "high" or "auto".
    """

    data: bytes
    detail: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Ask a process of `multimodal.preprocess_process` for the ids and images of a prompt.

    Attributes:
        text: The prompt as the chat template renders it, with one placeholder for each image.
        images: The files of the images, in the order of their placeholders.
        most_pixels: Pixels (width times height) that an image may have. They are read from the
            file's header, before anything is decoded.
        add_special_tokens: Whether the tokenizer adds its special tokens, such as BOS.
    """

    text: str
    images: list[ImageFile]
    most_pixels: int
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessed:
    """The answer to `Preprocess`.

    Attributes:
        input_ids: The ids of the prompt. Each placeholder has become the positions of its image.
        images: One for each file.
        error: Why the request is refused, with a remedy, for the client. Nothing else is set then.
        image: Index of the file that the error is about, if it is about one.
    """

    input_ids: list[int] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)
    error: str | None = None
    image: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessReady:
    """The first message of a process of `multimodal.preprocess_process`.

    Attributes:
        placeholder: The text of an image in prompts, as the model's chat templates write it.
        tokens_of_1024: Positions that an image of 1024 x 1024 pixels takes.
        error: Why the process cannot work, on one line. It ends then, with exit code 2.
    """

    placeholder: str = ""
    tokens_of_1024: int = 0
    error: str | None = None


Preprocessing = Preprocess | Preprocessed | PreprocessReady
