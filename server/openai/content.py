"""Contents on the wire that are strings or lists of content parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.schemas import WireModel
from ..media.parts import IMAGE_TYPES, ImagePart, bad_part, image_part

# Roles of the messages that may hold images: a user's, and the results of tools.
_WITH_IMAGES = ("user", "tool")


def parse_content(value: Any, info: ValidationInfo) -> str | list[str | ImagePart]:
    """Return the content of a message: a string, or the texts and images of its content parts.

    The chat template joins the texts of content parts. A part may be an `ImagePart` already, if
    another endpoint family has made the message.
    """
    role = info.data.get("role", "user")
    by_assistant = role == "assistant"
    if isinstance(value, str):
        return value
    beside = ("tool_calls", "refusal", "reasoning_content", "reasoning")
    if value is None and by_assistant and any(info.data.get(name) for name in beside):
        return ""
    if value is None:
        raise PydanticCustomError("missing", "Field required")
    kinds = ("text", "refusal") if by_assistant else ("text",)
    return [
        _image(part, index, role) if _is_image(part) else _part_text(part, index, kinds)
        for index, part in enumerate(_parts(value))
    ]


def _parts(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content parts"
        )
    return value


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(part, ImagePart) or kind in IMAGE_TYPES


def _image(part: Any, index: int, role: str) -> ImagePart:
    if role not in _WITH_IMAGES:
        place = () if isinstance(part, ImagePart) else (index, "image_url")
        raise bad_part(
            place, f"a message of the role {role} holds no images; move it to a message of the user"
        )
    return part if isinstance(part, ImagePart) else image_part(part, index)


def _part_text(part: Any, index: int, kinds: Sequence[str]) -> str:
    """Return the text of a content part. It is the member named like the part's type."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in kinds else None
    if not isinstance(text, str):
        message = "content part {index} is not of type {kinds} with a text, nor an image_url"
        raise PydanticCustomError(
            "unsupported_content", message, {"index": index, "kinds": " or ".join(kinds)}
        )
    return text


Content = Annotated[
    str | list[str | ImagePart],
    PlainValidator(parse_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ]
        }
    ),
]


def _prediction_texts(value: Any, info: ValidationInfo) -> list[str]:
    """Return the texts of a prediction: a string, or the texts of its content parts."""
    if isinstance(value, str):
        return [value]
    return [_part_text(part, index, ("text",)) for index, part in enumerate(_parts(value))]


class Prediction(WireModel):
    """Text that the client expects. It makes the answer faster and does not change it."""

    type: Literal["content"]
    content: Annotated[
        list[str],
        PlainValidator(_prediction_texts),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
        ),
    ]
