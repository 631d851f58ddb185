"""Texts and images of input items: as clients get them, and as parts of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import msgspec

from ...core.answers import Answer
from ...media.parts import Detail, ImagePart
from .texts import Part

Stored = dict[str, Any]  # An `InputPart` as decoded JSON.


class InputText(Answer, kw_only=True):
    type: Literal["input_text"] = "input_text"
    text: str


class InputImage(Answer, kw_only=True):
    type: Literal["input_image"] = "input_image"
    image_url: str
    detail: Detail = "auto"


InputPart = InputText | InputImage
_KINDS: dict[str, type[InputPart]] = {"input_text": InputText, "input_image": InputImage}


class HasParts(Protocol):
    """An input item."""

    @property
    def content(self) -> Any: ...

    @property
    def output(self) -> Any: ...


def kept_parts(parts: Sequence[Part]) -> list[InputPart]:
    """Return the parts as clients get them."""
    return [
        InputText(text=part)
        if isinstance(part, str)
        else InputImage(image_url=part.url, detail=cast("Detail", part.detail))
        for part in parts
    ]


def stored_parts(parts: Sequence[Stored]) -> list[InputPart]:
    """Return stored parts as clients get them."""
    return [msgspec.convert(part, _KINDS[part["type"]]) for part in parts]


def image_names(items: Iterable[HasParts]) -> dict[str, str]:
    """Return the parameter of each image in the input of a request, by the image's address."""
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        for member in ("content", "output"):
            parts = getattr(item, member)
            for place, part in enumerate(parts if isinstance(parts, list) else ()):
                if not isinstance(part, str):
                    names.setdefault(part.url, f"input[{index}].{member}[{place}].image_url")
    return names


def length(content: str | Sequence[Stored]) -> int:
    """Return the length of a text, or of the texts and the addresses of images of parts."""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or part.get("image_url") or "") for part in content)


def chat_parts(content: Sequence[Stored], names: Mapping[str, str]) -> list[Stored | ImagePart]:
    """Return the texts and images of a message as content parts of a chat."""
    found: list[Stored | ImagePart] = []
    for part in content:
        if part["type"] == "input_image":
            url = part["image_url"]
            param = names.get(url, "input")
            found.append(ImagePart(url, detail=part.get("detail", "auto"), param=param))
        elif text := part.get("text", part.get("refusal", "")):
            found.append({"type": "text", "text": text})
    return found
