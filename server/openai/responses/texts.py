"""Texts in input items: strings, or content parts that hold text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

# Types of content parts that hold text, and the member that holds it.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def parse_texts(value: Any) -> list[str]:
    """Return the texts of a string or of content parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content parts"
        )
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise PydanticCustomError(
                "unsupported_content",
                "content part {index} is not text, but this model reads only text: send "
                "parts of the type input_text",
                {"index": index},
            )
        texts.append(text)
    return texts


def parse_text(value: Any) -> str:
    """Return a string, or the texts of content parts joined by line ends."""
    return "\n".join(parse_texts(value))


_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
)
Text = Annotated[str, PlainValidator(parse_text), _SCHEMA]
Texts = Annotated[list[str], PlainValidator(parse_texts), _SCHEMA]


def _parse_output(value: Any) -> str:
    """Return the output of a tool. Parts without text are replaced by a note for the model."""
    if not isinstance(value, list):
        return parse_text(value)
    return parse_text([_seen(part) for part in value])


def _seen(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("input_image", "input_file"):
        return part
    return {"type": "text", "text": f"({kind}: this model reads only text)"}


Output = Annotated[str, PlainValidator(_parse_output), _SCHEMA]
