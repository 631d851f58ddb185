"""Texts and images in input items: strings, or content parts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from ...media.parts import IMAGE_TYPES, ImagePart, bad_part, image_part

Part = str | ImagePart
# Types of content parts that hold text, and the member that holds it.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def parse_parts(value: Any, info: ValidationInfo | None = None) -> list[Part]:
    """Return the texts and images of a string or of content parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content parts"
        )
    role = info and info.data.get("role")
    parts: list[Part] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_TYPES:
            if role not in (None, "user"):
                raise bad_part(
                    (index, "image_url"),
                    f"a message of the role {role} holds no images; move it to a message of the "
                    "user",
                )
            parts.append(image_part(part, index))
            continue
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise PydanticCustomError(
                "unsupported_content",
                "content part {index} is neither text nor an image; send parts of the type "
                "input_text or input_image",
                {"index": index},
            )
        parts.append(text)
    return parts


def parse_text(value: Any) -> str:
    """Return a string, or the texts of content parts joined by line ends."""
    parts = parse_parts(value)
    if not all(isinstance(part, str) for part in parts):
        raise PydanticCustomError("unsupported_content", "Input should be text without images")
    return "\n".join(map(str, parts))


_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
)
Text = Annotated[str, PlainValidator(parse_text), _SCHEMA]
Parts = Annotated[list[Part], PlainValidator(parse_parts), _SCHEMA]


def _parse_output(value: Any) -> str | list[Part]:
    """Return the output of a tool: a text, or parts if there is an image among them. Files are
    replaced by a note for the model.
    """
    parts = parse_parts([_seen(part) for part in value] if isinstance(value, list) else value)
    if all(isinstance(part, str) for part in parts):
        return "\n".join(map(str, parts))
    return parts


def _seen(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    is_image = kind == "input_image" and part.get("image_url") is not None
    if kind not in ("input_image", "input_file") or is_image:
        return part
    return {"type": "text", "text": f"({kind}: this model reads only text)"}


Output = Annotated[str | list[Part], PlainValidator(_parse_output), _SCHEMA]
