"""Images of messages while the messages get the form that a chat template reads.

prompt = render_with_images(templates, messages, placeholder, render)
prompt.images[i]                       # the number of the i-th image in `prompt.text`
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .chat_template import ChatTemplateError, ChatTemplates
from .template_reads import Message

IMAGE: Message = {"type": "image"}
# Takes messages and a function like `ChatTemplates.render`. Returns the prompt.
Render = Callable[[Sequence[Message], Callable[..., str]], str]


class Rendered(NamedTuple):
    """The text of a prompt. `images` are the numbers of the chat's images in their order there."""

    text: str
    images: list[int]


def render_with_images(
    templates: ChatTemplates, messages: Sequence[Message], placeholder: str, render: Render
) -> Rendered:
    """Return the prompt of messages with images (`IMAGE`). `placeholder` stands for an image.

    Raise `ChatTemplateError` if the template refuses the messages.
    """
    marks = ImageMarks()
    messages = marks.marked(messages)
    order: list[int] = []

    def in_parts(told: Sequence[Message], **settings: Any) -> str:
        told, order[:] = marks.in_parts(told)
        return templates.render(told, **settings)

    def in_text(told: Sequence[Message], **settings: Any) -> str:
        told, order[:] = marks.in_text(told, placeholder)
        return templates.render(told, **settings)

    # 1. Templates of models with images read parts of the type image.
    with contextlib.suppress(ChatTemplateError):
        text = render(messages, in_parts)
        if text.count(placeholder) == len(order):
            return Rendered(text, order)
    # 2. Others get the text that stands for an image.
    text = render(messages, in_text)
    if (count := text.count(placeholder)) != len(order):
        raise ChatTemplateError(
            f"the prompt has {count} times {placeholder!r}, which stands for an image, but "
            f"{len(order)} images; leave it out of texts"
        )
    return Rendered(text, order)


class ImageMarks:
    """Marks that no text of a client contains, because they have a random key.

    Contents with images become texts with marks, and parts again after texts were joined, moved and
    merged.
    """

    def __init__(self) -> None:
        key = uuid.uuid4().hex
        self._image, self._between = f"{key}i%dx", f"{key}b"
        # Groups: the number of an image, or None between two texts.
        self._mark = re.compile(rf"{key}(?:i(\d+)x|b)")

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages. A content with an image (`IMAGE`) becomes one text with marks.

        Images are numbered in their order.
        """
        found, number = [], 0
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and IMAGE in content:
                texts: list[str] = []
                for part in content:
                    if part == IMAGE:
                        texts.append(self._image % number)
                        number += 1
                        continue
                    if texts and self._mark.fullmatch(texts[-1]) is None:
                        texts.append(self._between)
                    texts.append(part["text"])
                message = {**message, "content": "".join(texts)}
            found.append(message)
        return found

    def in_parts(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """Return the messages with lists of parts for texts with marks, and the images' numbers."""
        order: list[int] = []
        found = []
        for message in messages:
            text = self._text(message)
            if text is not None and self._mark.search(text):
                parts: list[Message] = []
                pieces = self._mark.split(text)
                for index, piece in enumerate(pieces):
                    if index % 2 == 0:
                        parts += [{"type": "text", "text": piece}] if piece else []
                    elif piece is not None:
                        order.append(int(piece))
                        parts.append(dict(IMAGE))
                message = {**message, "content": parts}
            found.append(message)
        return found, order

    def in_text(
        self, messages: Sequence[Message], placeholder: str
    ) -> tuple[list[Message], list[int]]:
        """Return the messages with `placeholder` for each image, for templates that read texts
        alone, and the images' numbers.
        """
        order: list[int] = []

        def written(match: re.Match[str]) -> str:
            if match[1] is None:
                return "\n"
            order.append(int(match[1]))
            return placeholder

        found = []
        for message in messages:
            text = self._text(message)
            if text is not None:
                text = self._mark.sub(written, text)
                is_list = isinstance(message["content"], list)
                content = [{"type": "text", "text": text}] if is_list else text
                message = {**message, "content": content}
            found.append(message)
        return found, order

    def _text(self, message: Message) -> str | None:
        """Return the text of a content that is a string, or a list of one text part."""
        content = message.get("content")
        if isinstance(content, list) and len(content) == 1:
            content = content[0].get("text")
        return content if isinstance(content, str) else None
