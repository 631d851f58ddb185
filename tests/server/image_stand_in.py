"""A `Preprocessor` for tests without a model, and files of images."""

from __future__ import annotations

import base64
from io import BytesIO

from PIL import Image

from piecework.runtime.core.images import (
    ImageInput,
    ImageTensor,
    Preprocess,
    Preprocessed,
    PreprocessReady,
)
from piecework.runtime.tokenizer.tokenizer import Tokenizer

PLACEHOLDER = "<image>"
TOKENS = 4  # Positions of each image.


class StandIn:
    """Reads no pixels: an image is `TOKENS` times the token 0. `requests` are those that came."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.requests: list[Preprocess] = []
        self.refusal: Preprocessed | None = None
        self.error: Exception | None = None
        self.is_closed = False

    async def ready(self) -> PreprocessReady:
        return PreprocessReady(placeholder=PLACEHOLDER, tokens_of_1024=TOKENS)

    async def run(self, request: Preprocess) -> Preprocessed:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        if self.refusal is not None:
            return self.refusal
        first, *others = request.text.split(PLACEHOLDER)
        assert len(others) == len(request.images), request.text
        ids = self._tokenizer.encode(first, add_special_tokens=request.add_special_tokens)
        images = []
        for file, other in zip(request.images, others, strict=True):
            tensor = ImageTensor(dtype="uint8", shape=[len(file.data)], data=file.data)
            images.append(
                ImageInput(
                    start=len(ids), length=TOKENS, digest=b"d" * 16, tensors={"pixels": tensor}
                )
            )
            ids += [0] * TOKENS + self._tokenizer.encode(other, add_special_tokens=False)
        return Preprocessed(input_ids=ids, images=images)

    async def close(self) -> None:
        self.is_closed = True


def image_file(kind: str = "PNG", size: tuple[int, int] = (3, 2)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, kind)
    return file.getvalue()


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(content)}"
