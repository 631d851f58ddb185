"""The request of `POST /v1/images/generations`.

Names and meanings are those of https://platform.openai.com/docs/api-reference/images; parameters
beyond OpenAI's (`num_inference_steps` and the like) are named as in SGLang and diffusers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ..core.schemas import Integer, Seed, Unsupported, WireModel, disagreement

MAX_IMAGES = 10  # Maximum of `n`, as in OpenAI's API.
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


class Size(NamedTuple):
    """Width and height in pixels, or None for the pipeline's default."""

    width: int | None
    height: int | None


def parse_size(value: Any) -> Size:
    """Parse `auto`, or width and height such as `1024x768`."""
    if value == "auto":
        return Size(None, None)
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise PydanticCustomError(
            "size", "Input should be a width and a height in pixels, such as 1024x768, or auto"
        )
    return Size(int(found[1]), int(found[2]))


def _only_one_frame(value: Any) -> Any:
    if value != 1:
        raise PydanticCustomError(
            "frames",
            "this endpoint makes images, of one frame; videos are made by piecework generate",
        )
    return value


def _only_guidance(value: Any) -> Any:
    raise PydanticCustomError(
        "renamed", "send guidance_scale instead: for Qwen-Image it is diffusers' true_cfg_scale"
    )


class ImagesRequest(WireModel):
    """The prompt, the parameters of the pipeline, and the form of the answer."""

    prompt: str
    model: str | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)] = 1
    size: Annotated[
        Size, PlainValidator(parse_size), WithJsonSchema({"type": "string", "default": "auto"})
    ] = Size(None, None)
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[
        Integer, Field(ge=0, le=100, description="quality of jpeg and webp")
    ] = 95
    user: str | None = None

    quality: Annotated[str | None, Field(description="ignored, with a warning")] = None
    style: Annotated[str | None, Field(description="ignored, with a warning")] = None
    background: Annotated[str | None, Field(description="ignored, with a warning")] = None
    moderation: Annotated[str | None, Field(description="ignored, with a warning")] = None

    seed: Annotated[
        Seed | None,
        Field(description="of the first image, the next one's is one more; default: drawn"),
    ] = None
    width: Integer | None = None
    height: Integer | None = None
    negative_prompt: str | None = None
    num_inference_steps: Integer | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    num_frames: Annotated[Integer, AfterValidator(_only_one_frame)] = 1

    true_cfg_scale: Annotated[Any, AfterValidator(_only_guidance)] = None
    stream: Unsupported = None
    partial_images: Unsupported = None

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if "size" in self.model_fields_set and self.model_fields_set & {"width", "height"}:
            raise disagreement("size", "give either size, or width and height")
        return self

    @property
    def ignored(self) -> list[str]:
        """The fields of the request that have no effect."""
        harmless = {"background": ("auto", "opaque"), "moderation": ("auto",), "quality": ("auto",)}
        names = ("quality", "style", "background", "moderation")
        return [
            name for name in names if getattr(self, name) not in (None, *harmless.get(name, ()))
        ]
