"""The images of one model's requests: from the parts of messages to what the engine reads.

media = Media(config, processes)
text = ...                                    # with `await media.placeholder()` for each image
prompt = await media.prompt(text, parts, add_special_tokens=False)
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ...runtime.core.images import ImageFile, ImageInput, Preprocess, PreprocessReady
from ..config.media import MediaConfig
from ..core.errors import Unavailable
from ..http.turns import Room
from .parts import ImagePart
from .process import Preprocessor, ProcessEnded, Unusable
from .sources import Sources, refused

logger = logging.getLogger(__name__)

# Bytes of image files that are read and not decoded yet: of one request, and of the base64 of all.
_MOST_FILES = 48 * 2**20
# Bytes of the tensors of unfinished requests, from which on others wait.
_MOST_TENSORS = 512 * 2**20
_WAIT = 0.05  # Seconds between two looks at the tensors of unfinished requests.


class HeldImages(list[ImageInput]):
    """The images of a prompt, whose tensors are counted as long as this list lives."""


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt, and its images in their order."""

    ids: list[int]
    images: Sequence[ImageInput] = ()


class Media:
    """Reads the images of requests for one model.

    Attributes:
        info: What the model's images need; None until that is known.
        failed: Set if the first process finds that the model's images cannot be read.
        failure: The reason for that.
    """

    def __init__(self, config: MediaConfig, preprocessor: Preprocessor) -> None:
        self._sources = Sources(config)
        self._preprocessor = preprocessor
        self._most_images = config.most_images
        self._most_pixels = config.max_image_pixels
        self._files = Room(_MOST_FILES)
        self._held = 0
        self._starting: asyncio.Task[None] | None = None
        self.info: PreprocessReady | None = None
        self.failed = asyncio.Event()
        self.failure: str | None = None

    async def ready(self) -> PreprocessReady:
        """Return what the model's images need. Raise `Unavailable`."""
        if self._starting is not None and not self._starting.done():
            # A caller that leaves does not end the start.
            await asyncio.shield(self._starting)
        if self.info is None:
            self.info = await self._preprocessor.ready()
        return self.info

    def start(self) -> None:
        """Start the first process, so that the first image does not wait for it.

        Call it again after a failure: the model may have been repaired.
        """
        self.failed.clear()
        self.failure = None
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            self.info = await self._preprocessor.ready()
        except Unusable as error:
            self.failure = error.reason
            self.failed.set()
        except Unavailable as error:
            logger.error("%s", error.message)

    async def settle(self, seconds: float) -> None:
        """Wait until the first process has started or failed, for at most this time."""
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=seconds)

    async def close(self) -> None:
        """End the processes."""
        if self._starting is not None:
            self._starting.cancel()
        await self._preprocessor.close()

    def described(self) -> str:
        """Return the line of the start's summary."""
        most = f"at most {self._most_images} in a request (--limit-mm-per-prompt)"
        if self.info is None:
            return f"{most}; the process that reads them is starting"
        return f"{self.info.tokens_of_1024:,} tokens for 1024 x 1024 pixels, {most}"

    def check_count(self, parts: Sequence[ImagePart]) -> None:
        """Raise `InvalidRequest` if a request has too many images."""
        if len(parts) > self._most_images:
            raise refused(
                parts[self._most_images].param,
                f"the request has {len(parts)} images, more than the {self._most_images} of "
                "--limit-mm-per-prompt; send fewer",
                code="too_many_images",
            )

    async def prompt(
        self, text: str, parts: Sequence[ImagePart], param: str, *, add_special_tokens: bool
    ) -> EncodedPrompt:
        """Return the prompt of a text that has a placeholder for each of `parts`.

        `param` is the parameter of the prompt. Raise `InvalidRequest`, which names the part, and
        `Unavailable`.
        """
        while self._held > _MOST_TENSORS:
            await asyncio.sleep(_WAIT)
        weight = sum(len(part.url) + len(part.data) for part in parts)
        await self._files.take(weight)
        try:
            request = Preprocess(
                text=text,
                images=await self._read(parts),
                most_pixels=self._most_pixels,
                add_special_tokens=add_special_tokens,
            )
            answer = await self._preprocessor.run(request)
        except ProcessEnded as ended:
            named = parts[0].param if len(parts) == 1 else param
            remedy = "send smaller or fewer images, as PNG or JPEG"
            raise refused(named, f"{ended}; {remedy}", code="unreadable_image") from None
        finally:
            self._files.give(weight)
        if answer.error is not None:
            named = param if answer.image is None else parts[answer.image].param
            raise refused(named, answer.error)
        images = HeldImages(answer.images)
        size = sum(len(each.data) for image in images for each in image.tensors.values())
        self._held += size
        weakref.finalize(images, self._free, size)
        return EncodedPrompt(answer.input_ids, images)

    async def _read(self, parts: Sequence[ImagePart]) -> list[ImageFile]:
        """Return the files of the parts. Their texts are dropped."""
        files: list[ImageFile] = []
        size = 0
        for part in parts:
            content = await self._sources.read(part)
            size += len(content)
            if size > _MOST_FILES:
                raise refused(
                    part.param,
                    f"the images of the request have more than {_MOST_FILES} bytes; send fewer",
                )
            files.append(ImageFile(data=content, detail=part.detail))
        return files

    def _free(self, size: int) -> None:
        self._held -= size
