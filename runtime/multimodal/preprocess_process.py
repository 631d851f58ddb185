"""Turns images of strangers into tensors.

Run `python -m piecework.runtime.multimodal.preprocess_process MODEL [TOKENIZER] [MMPROJ]
[PRE_TOKENIZER]`, where "" stands for nothing. The web process starts it and keeps it alive.
Decoders of images read what strangers send, so they run here, with limits on memory. The parent
limits the time.

The process writes a `PreprocessReady` to standard output, and then a `Preprocessed` for each
`Preprocess` that it reads from standard input (`process.message_pipe`). It ends when standard input
closes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from ..core.images import (
    ImageFile,
    ImageInput,
    ImageTensor,
    Preprocess,
    Preprocessed,
    PreprocessReady,
    digest_of,
)
from ..files.resolve import resolve_model_path
from ..process.message_pipe import pack, read
from ..tokenizer.tokenizer import load_tokenizer
from .family import ImageFamily
from .settings import MOST_POSITIONS
from .source import find_source

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
EXIT_UNUSABLE = 2
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
# Width and height in pixels of images that are tried at the start.
_TRIALS = (1024, 1024), (600, 64), (64, 600)
_LEAST_SIDE = 2  # Pixels. Image processors cannot tell the channels of smaller images.
_EXTRA_MEMORY = 3 * 2**29  # Bytes of memory beside what the libraries take.
_MOST_KEPT = 2**27  # Bytes of tensors that are kept for images that come again.


class Refused(Exception):
    """An image or a prompt is refused. The message says why, for the client."""

    def __init__(self, reason: str, image: int | None = None) -> None:
        super().__init__(reason)
        self.image = image


class _Processed(NamedTuple):
    """An image's text in the prompt, and what its encoder reads."""

    text: str
    tensors: dict[str, ImageTensor]
    digest: bytes


class Preprocessor:
    """The image processor and the tokenizer of a model folder. Raises `ValueError`."""

    def __init__(
        self,
        model_path: str,
        tokenizer_path: str | None = None,
        mmproj: str | None = None,
        gguf_pre_tokenizer: str | None = None,
    ) -> None:
        self._path = path = resolve_model_path(model_path)
        if (source := find_source(path, mmproj)) is None:
            raise ValueError(f"the model of {path} takes no images here")
        self.family: ImageFamily = source.family
        self._tokenizer = load_tokenizer(
            path, tokenizer_path, gguf_pre_tokenizer=gguf_pre_tokenizer
        )
        self._processor = source.image_processor()
        token, backend = self.family.image_token, self._tokenizer.backend
        is_absent = backend.token_to_id(token) is None
        if is_absent and path.endswith(".gguf"):
            # Converters drop a token without an embedding.
            backend.add_special_tokens([AddedToken(token, normalized=False)])
        token_id = backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer of {path} has no token {token!r}; download it again")
        self._token_id: int = token_id
        # The id that the engine gets. The encoder replaces the embedding, so any id will do.
        sent_id = 0 if is_absent else self.family.sent_id
        self._sent_id: int = token_id if sent_id is None else sent_id
        self._kept: OrderedDict[bytes, _Processed] = OrderedDict()
        self._kept_bytes = 0

    def ready(self) -> PreprocessReady:
        """Return the first message, after a trial with images of several sizes.

        Raise `ValueError` if one of them cannot be processed.
        """
        counts = [self._tried(*size) for size in _TRIALS]
        return PreprocessReady(placeholder=self.family.placeholder, tokens_of_1024=counts[0])

    def _tried(self, width: int, height: int) -> int:
        """Return the positions of an image. Raise `ValueError` if it cannot be processed."""
        from PIL import Image

        try:
            processed = self._process(Image.new("RGB", (width, height)), "auto")
            count = processed.text.count(self.family.image_token)
            self._check_trial(processed, count)
            return count
        except Exception as error:
            told = " ".join(str(error).split())
            reason = told if isinstance(error, ValueError) else f"{type(error).__name__}: {told}"
            raise ValueError(
                f"an image of {width} x {height} pixels cannot be processed as {self._path} says "
                f"({reason:.200}); download the model again, or add --disable-vision"
            ) from None

    def _check_trial(self, processed: _Processed, count: int) -> None:
        pixels = processed.tensors[self.family.tensors[0]]
        wanted = self.family.pixel_shape()
        if wanted and tuple(pixels.shape[-len(wanted) :]) != wanted:
            raise ValueError(
                f"it becomes numbers of the shape {pixels.shape}, but the vision tower reads "
                f"{list(wanted)}"
            )
        if not 1 <= count <= MOST_POSITIONS:
            raise ValueError(f"it has {count} positions, but 1 to {MOST_POSITIONS} are possible")
        if not np.isfinite(pixels.array()).all():
            raise ValueError("its colours are no finite numbers")

    def answer(self, request: Preprocess) -> Preprocessed:
        """Return the ids and images of a prompt, or why it is refused."""
        try:
            return self._answer(request)
        except Refused as refused:
            return Preprocessed(error=str(refused), image=refused.image)

    def _answer(self, request: Preprocess) -> Preprocessed:
        placeholder = self.family.placeholder
        first, *others = request.text.split(placeholder)
        if len(others) != len(request.images):
            raise Refused(
                f"the prompt has {len(others)} image placeholders ({placeholder}) for "
                f"{len(request.images)} images; leave {placeholder} out of texts, and send images "
                "as parts of their own"
            )
        images = [
            self._load(file, request.most_pixels, number, len(request.images))
            for number, file in enumerate(request.images)
        ]
        text = first + "".join(
            image.text + other for image, other in zip(images, others, strict=True)
        )
        encode = self._tokenizer.encode
        ids = encode(text, add_special_tokens=request.add_special_tokens)
        places = np.flatnonzero(np.array(ids) == self._token_id)
        counts = [image.text.count(self.family.image_token) for image in images]
        if len(places) != sum(counts):
            raise Refused(
                f"the prompt's text holds the image token {self.family.image_token}; leave it out"
            )
        begins = np.cumsum([0, *counts])
        found = []
        for image, begin, count in zip(images, begins, counts, strict=False):
            own = places[begin : begin + count]
            length = int(own[-1] - own[0]) + 1
            found.append(
                ImageInput(
                    start=int(own[0]),
                    length=length,
                    digest=image.digest,
                    tensors=image.tensors,
                    rows=[] if length == count else (own - own[0]).tolist(),
                )
            )
        if self._sent_id != self._token_id:
            ids = [self._sent_id if each == self._token_id else each for each in ids]
        return Preprocessed(input_ids=ids, images=found)

    def _load(self, file: ImageFile, most_pixels: int, number: int, count: int) -> _Processed:
        detail = self.family.detail(file.detail, count)
        key = blake2b(f"{detail} ".encode() + file.data, digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            image = _decode(file.data, most_pixels)
            processed = self._process(image, detail)
        except Refused as refused:
            raise Refused(str(refused), number) from None
        except MemoryError:
            raise Refused("the image takes too much memory; send a smaller one", number) from None
        except Exception as error:
            raise Refused(
                f"the image cannot be processed ({type(error).__name__}: {error!s:.200}); send "
                "another size or file",
                number,
            ) from None
        self._keep(key, processed)
        return processed

    def _process(self, image: Any, detail: str) -> _Processed:
        arrays = self.family.process(self._processor, image, detail)
        tensors = {
            name: ImageTensor.of(_narrowed(name, arrays[name]))
            for name in self.family.tensors
            if name in arrays
        }
        return _Processed(self.family.text(arrays), tensors, digest_of(tensors))

    def _keep(self, key: bytes, processed: _Processed) -> None:
        """Keep the tensors of an image, and drop those that were not used for longest."""
        self._kept[key] = processed
        self._kept_bytes += _num_bytes(processed)
        while self._kept_bytes > _MOST_KEPT:
            self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


def _decode(data: bytes, most_pixels: int) -> Any:
    """Return the first frame of an image file as RGB. Raises `Refused`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # `most_pixels` is the limit.
    try:
        image: Any = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise Refused(
            "the file is no image that this server can read; send PNG, JPEG, WebP or GIF"
        ) from None
    except Exception:
        raise Refused("the image is damaged; send the whole file") from None
    width, height = image.size
    if width * height > most_pixels:
        raise Refused(
            f"the image has {width} x {height} pixels, but at most {most_pixels} pixels are "
            "allowed; send a smaller one"
        )
    if min(width, height) < _LEAST_SIDE:
        raise Refused(
            f"the image has {width} x {height} pixels, but each side needs at least {_LEAST_SIDE}"
        )
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except Exception:
        raise Refused("the image is truncated or damaged; send the whole file") from None


def _narrowed(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array with float64 as float32, and a mask as bool: processors make masks of int64,
    which would be most of a message.
    """
    if name.endswith("_mask"):
        return array.astype(np.bool_)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _num_bytes(processed: _Processed) -> int:
    return sum(len(tensor.data) for tensor in processed.tensors.values())


def _limit_memory() -> None:
    """Bound the memory of this process at what it has now and `_EXTRA_MEMORY`."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return  # Other systems than Linux.
    most = pages * os.sysconf("SC_PAGE_SIZE") + _EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    # Libraries may print. Only this process's own messages reach standard output.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def write(message: Preprocessed | PreprocessReady) -> None:
        output.write(pack(message))
        output.flush()

    try:
        model, *others = sys.argv[1:]
        preprocessor = Preprocessor(model, *(value or None for value in others))
        _limit_memory()
        ready = preprocessor.ready()
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in _SHORTAGES:
            # Not the model's fault, and it may pass.
            raise
        write(PreprocessReady(error=" ".join(str(error).split())))
        return EXIT_UNUSABLE
    with suppress(BrokenPipeError):
        write(ready)
        while (request := read(sys.stdin.buffer)) is not None:
            try:
                answer = preprocessor.answer(request)
            except MemoryError:
                answer = Preprocessed(error="the images take too much memory; send smaller ones")
            write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
