"""The requests of `/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/v1/classify`.

Sources of names and meanings: https://platform.openai.com/docs/api-reference/embeddings,
https://docs.cohere.com/reference/rerank, https://jina.ai/reranker (`return_documents`), and vLLM's
docs/serving/openai_compatible_server.md (`text_1`, `text_2`, `truncate_prompt_tokens`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ..core.schemas import Integer, Prompt, WireModel, disagreement, parse_prompts

MAX_INPUTS = 2048  # Inputs of a request, as in OpenAI's API.
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _check_count(count: int) -> None:
    if count > MAX_INPUTS:
        raise PydanticCustomError(
            "too_many_sequences",
            "the request has {count} inputs, more than {most}; send several requests",
            {"count": count, "most": MAX_INPUTS},
        )
    if not count:
        raise PydanticCustomError("empty_input", "the list is empty; send some text")


def _refuse_images(parts: list[Any]) -> None:
    """Raise an error for parts of images in the forms of OpenAI, vLLM and Jina."""
    kinds = ("image", "image_url", "input_image")
    for index, part in enumerate(parts):
        if isinstance(part, dict) and any(
            part.get("type") == kind or kind in part for kind in kinds
        ):
            raise PydanticCustomError(
                "unsupported_content",
                "input {index} is an image, and images are not embedded yet; send texts",
                {"index": index},
            )


def parse_inputs(value: Any) -> list[Prompt]:
    """Parse prompts as `parse_prompts`, at most `MAX_INPUTS`."""
    _refuse_images(value if isinstance(value, list) else [value])
    prompts = parse_prompts(value)
    _check_count(len(prompts))
    return prompts


def parse_texts(value: Any) -> list[str]:
    """Parse one text or a list of texts: strings, or objects with a `text`."""
    parts = value if isinstance(value, list) else [value]
    _check_count(len(parts))
    _refuse_images(parts)
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise PydanticCustomError(
            "text_type",
            "Input should be a string, an object with the string text, or a list of these",
        )
    return texts


def parse_classified(value: Any) -> list[tuple[str, ...]]:
    """Parse a text, or a list of texts and pairs of texts."""
    parts = value if isinstance(value, list) else [value]
    _check_count(len(parts))
    found = [tuple(part) if isinstance(part, list) else (part,) for part in parts]
    if not all(len(each) in (1, 2) and all(isinstance(t, str) for t in each) for each in found):
        raise PydanticCustomError(
            "text_type", "Input should be a text, or a list of texts and of pairs of texts"
        )
    return found


Inputs = Annotated[
    list[Prompt],
    PlainValidator(parse_inputs),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _TEXTS,
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
_PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
_OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}}
Texts = Annotated[
    list[str],
    PlainValidator(parse_texts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _OBJECT]}},
            ]
        }
    ),
]
Cut = Annotated[
    Integer | None,
    Field(
        description="number of tokens to keep of longer texts; -1: the model's maximum; default: "
        "longer texts are refused"
    ),
]


class EmbeddingsRequest(WireModel):
    """A request for vectors of texts or token ids."""

    input: Inputs
    model: str | None = None
    dimensions: Annotated[
        Integer | None,
        Field(ge=1, description="number of dimensions to keep of each vector; default: all"),
    ] = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Cut = None
    add_special_tokens: bool = True
    prompt_name: Annotated[
        str | None,
        Field(
            description="name of the model's prompt to put before texts; default: the model's own"
        ),
    ] = None
    user: str | None = None


class ClassifyRequest(WireModel):
    """A request for the label probabilities of texts or pairs of texts."""

    input: Annotated[
        list[tuple[str, ...]],
        PlainValidator(parse_classified),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"anyOf": [{"type": "string"}, _PAIR]}},
                ]
            }
        ),
    ]
    model: str | None = None
    truncate_prompt_tokens: Cut = None
    user: str | None = None


class RerankRequest(WireModel):
    """A request to sort documents by their relevance to a query."""

    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    model: str | None = None
    top_n: Annotated[
        Integer | None,
        Field(ge=0, description="number of best documents to return; 0, the default: all"),
    ] = None
    return_documents: bool = True
    truncate_prompt_tokens: Cut = None
    user: str | None = None


class ScoreRequest(WireModel):
    """A request to score pairs of texts: one with each text, or equally many on both sides.

    `queries` and `documents` are other names of `text_1` and `text_2`.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    model: str | None = None
    truncate_prompt_tokens: Cut = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        for one, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise disagreement(one, "this parameter is required, under one of its names")
        first, second = self.sides
        if len(first) not in (1, len(second)):
            raise disagreement(
                "text_1", "it should be one text, or as many as there are on the other side"
            )
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        return self.text_1 or self.queries or [], self.text_2 or self.documents or []

    @property
    def names(self) -> tuple[str, str]:
        """The names of the parameters that the client used."""
        return (
            "text_1" if self.text_1 is not None else "queries",
            "text_2" if self.text_2 is not None else "documents",
        )
