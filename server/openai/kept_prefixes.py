"""Finds in a prompt where the prefixes end that the client wants kept."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...runtime.core.images import ImageInput
from ...runtime.tokenizer.tokenizer import Tokenizer
from .requests import ChatOptions


class Marks:
    """Marks that no text of a client contains, because they have a random key."""

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex
        self._any = re.compile(rf"{self._key}(\d)x")

    def mark(self, number: int) -> str:
        """Return the mark number 0 to 9."""
        return f"{self._key}{number}x"

    def before(self, text: str, number: int) -> str | None:
        """Return what precedes a mark, without other marks. None if the text lacks the mark."""
        found, mark, _ = text.partition(self.mark(number))
        return self._any.sub("", found) if mark else None


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """The prefixes of one chat that the client wants kept.

    Attributes:
        seconds: By number of the mark, for how long the prefix before the mark is kept.
        whole: For how long the whole prompt is kept; 0 if the client does not ask for it.
        options: The chat with the marks in its texts. None without marks.
        marks: The marks.
    """

    seconds: Sequence[float] = ()
    whole: float = 0.0
    options: ChatOptions | None = None
    marks: Marks = field(default_factory=Marks)

    def found(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        marked: str,
        ids: Sequence[int],
        images: Sequence[ImageInput] = (),
        placeholder: str = "",
    ) -> list[tuple[int, float]]:
        """Return the numbers of tokens and the seconds of the marked prefixes.

        `prompt` is the text of `ids`, and `marked` the same with marks. The text of an image is
        `placeholder`.
        """
        found: list[tuple[int, float]] = []
        for number, seconds in enumerate(self.seconds):
            text = self.marks.before(marked, number)
            if text is None:
                continue  # The template has left out the text of the mark.
            if not prompt.startswith(text):
                # The template treats the marked text differently, for example its first blank.
                pairs = enumerate(zip(text, prompt, strict=False))
                text = text[: next((n for n, (a, b) in pairs if a != b), len(prompt))]
            tokens = tokens_of(tokenizer, text, ids, images, placeholder)
            found += [(tokens, seconds)] if tokens else []
        return found


def tokens_of(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    images: Sequence[ImageInput] = (),
    placeholder: str = "",
) -> int:
    """Return how many of `ids` belong to `text`, with which their text begins.

    Bytes of tokens are counted. Where a tokenizer changes a text, the number may be wrong by a few.
    """
    position = 0
    if images and (count := text.count(placeholder)):
        position = images[min(count, len(images)) - 1].end
        text = text.rpartition(placeholder)[2]
    left = len(text.encode("utf-8", "replace"))
    while position < len(ids) and (left := left - len(tokenizer.token_bytes(ids[position]))) >= 0:
        position += 1
    return position
