"""The images of messages in OpenAI's format, for `piecework.LLM`.

messages, files = take_images(messages)
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from ..core.images import ImageFile
from .image_marks import IMAGE
from .template_reads import Message

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_ROLES = ("user", "tool")


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageFile]]:
    """Return the messages with `IMAGE` for each part of the type image_url, and the images.

    Raise `ValueError` that names the part.
    """
    found: list[Message] = []
    files: list[ImageFile] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for index, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") == "image_url":
                    name = f"messages[{number}].content[{index}].image_url"
                    if message.get("role") not in _ROLES:
                        raise ValueError(f"{name}: move the image to a message of the user")
                    files.append(_file(part.get("image_url"), name))
                    part = dict(IMAGE)
                parts.append(part)
            message = {**message, "content": parts}
        found.append(message)
    return found, files


def _file(image: Any, name: str) -> ImageFile:
    """Return the image of an address, or of an object with `url` and `detail`."""
    told = image if isinstance(image, dict) else {"url": image}
    url = told.get("url")
    if not isinstance(url, str) or (head := _DATA_URL.match(url[:256])) is None:
        raise ValueError(f"{name} is no data URL; give data:image/png;base64, and the file")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except binascii.Error:
        raise ValueError(f"{name}: the base64 is damaged; encode the whole file again") from None
    return ImageFile(data=data, detail=told.get("detail") or "auto")
