"""Images on the wire, in the one form that the parts of all endpoint families become.

ImagePart("data:image/png;base64,iVBOR...", detail="low")
image_part({"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

Detail = Literal["auto", "low", "high"]
# Types of content parts that hold an image, in chats and in the Responses API.
IMAGE_TYPES = ("image_url", "input_image")

# What replaces an image in the result of a tool, for models that read no images.
NOTE = "(image: this model reads only text)"


@dataclass(slots=True)
class ImagePart:
    """An image as a client sent it.

    Attributes:
        url: A data URL, or an address with http, https or file. "" once the image was read.
        data: The image in base64, if there is no `url`.
        param: The parameter that holds the image, for errors. "" for a part of a chat, which its
            place in the messages names.
    """

    url: str = ""
    data: str = ""
    detail: str = "auto"
    param: str = ""

    def clear(self) -> None:
        """Drop the contents, which may be megabytes of text."""
        self.url = self.data = ""


def image_of(text: str, param: str) -> ImagePart:
    """Return the image of a text that is an address, or the image itself in base64."""
    if text[:5].lower() in ("data:", "file:", "http:", "https"):
        return ImagePart(text, param=param)
    return ImagePart(data=text, param=param)


def image_part(part: dict[str, Any], *place: str | int, param: str = "") -> ImagePart:
    """Return the image of a content part of a type of `IMAGE_TYPES`.

    `image_url` is an address, or an object with `url` and `detail`. `place` is the part's place in
    the value that is validated. Raise pydantic's `ValidationError`.
    """
    value, detail = part.get("image_url"), part.get("detail")
    if isinstance(value, dict):
        detail = value.get("detail", detail)
        value = value.get("url")
    if part.get("file_id") is not None and value is None:
        raise bad_part(
            (*place, "file_id"),
            "images are not read from uploaded files; send image_url with a data URL",
        )
    if not isinstance(value, str) or not value:
        raise bad_part(
            (*place, "image_url"),
            "Input should be an address, or an object with an address in url, such as "
            "data:image/png;base64,...",
        )
    if detail not in (None, *get_args(Detail)):
        raise bad_part((*place, "detail"), "Input should be auto, low or high")
    return ImagePart(value, detail=detail or "auto", param=param)


def bad_part(location: tuple[str | int, ...], message: str) -> ValidationError:
    """Return an error at a place below the value that is validated."""
    error = PydanticCustomError("unsupported_content", "{message}", {"message": message})
    details = InitErrorDetails(type=error, loc=location, input=None)
    return ValidationError.from_exception_data("image", [details])
