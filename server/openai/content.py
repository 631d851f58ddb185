"""Texts on the wire that are strings or lists of content parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.schemas import WireModel


def parse_content(value: Any, info: ValidationInfo) -> str | list[str]:
    """Return the text of a message: a string, or the texts of its content parts.

    The chat template joins the texts of content parts.
    """
    by_assistant = info.data.get("role") == "assistant"
    if isinstance(value, str):
        return value
    beside = ("tool_calls", "refusal", "reasoning_content", "reasoning")
    if value is None and by_assistant and any(info.data.get(name) for name in beside):
        return ""
    if value is None:
        raise PydanticCustomError("missing", "Field required")
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content parts"
        )
    return [
        _part_text(part, index, ("text", "refusal") if by_assistant else ("text",))
        for index, part in enumerate(value)
    ]


def _part_text(part: Any, index: int, kinds: Sequence[str]) -> str:
    """Return the text of a content part. It is the member named like the part's type."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in kinds else None
    if not isinstance(text, str):
        message = (
            "content part {index} is not of type {kinds} with a text; this model reads only text"
        )
        raise PydanticCustomError(
            "unsupported_content", message, {"index": index, "kinds": " or ".join(kinds)}
        )
    return text


Content = Annotated[
    str | list[str],
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
    content = parse_content(value, info)
    return [content] if isinstance(content, str) else content


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
