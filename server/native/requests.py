"""Models of the requests of SGLang's native endpoints.

Names and meanings are those of https://docs.sglang.io/basic_usage/native_api.html and its sampling
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from ..config.media import MOST_IMAGES
from ..core.limits import MAX_SEQUENCES
from ..core.parameters import GENERATION, Others
from ..core.schemas import (
    AdapterName,
    Count,
    IdLists,
    Integer,
    Priority,
    SamplingFields,
    Seed,
    Texts,
    Unsupported,
    WireModel,
    disagreement,
    only,
)
from ..media.parts import ImagePart, image_of
from ..serving.structured import StructuredFields

T = TypeVar("T")
_PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "lora_path",
)


class NativeSampling(SamplingFields, StructuredFields):
    """`sampling_params`. If `max_new_tokens` is null, the rest of the context is the limit."""

    keeps_null: ClassVar[frozenset[str]] = frozenset({"max_new_tokens"})
    others: ClassVar[Others] = GENERATION

    max_new_tokens: Count | None = 128
    min_new_tokens: Count = 0
    no_stop_trim: bool = False
    sampling_seed: Seed | None = None

    stop_regex: Unsupported = None
    custom_params: Unsupported = None
    beam_width: Annotated[Any, only(1)] = None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class _OneOrEach:
    """Declares in the schema that one value may replace the list."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        each = handler(schema)
        return {"anyOf": [each["items"], each]}


# One value for all prompts, or a list with one value per prompt.
PerPrompt = Annotated[
    list[T], FailFast(), Field(max_length=MAX_SEQUENCES), BeforeValidator(_as_list), _OneOrEach()
]


def _parse_rid(value: Any) -> str | list[str]:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and 0 < len(name) <= 256 for name in names):
        raise PydanticCustomError(
            "rid_type", "Input should be a string of 1 to 256 characters, or a list of such strings"
        )
    return value  # type: ignore[no-any-return]


Rid = Annotated[str | list[str], PlainValidator(_parse_rid), WithJsonSchema({"type": "string"})]


def _parse_images(given: Any) -> str | list[str] | list[list[str]]:
    """Return images: one, a list, or a list for each prompt."""
    if not isinstance(given, list):
        return _address(given)
    nested = any(isinstance(each, list) for each in given)
    lists = [each if isinstance(each, list) else [each] for each in given] if nested else [given]
    if sum(map(len, lists)) > MOST_IMAGES:
        raise PydanticCustomError("image_data_size", "Input has too many images")
    found = [[_address(image) for image in images if image is not None] for images in lists]
    return found if nested else found[0]


def _address(image: Any) -> str:
    if isinstance(image, dict):
        image = image.get("url")
    if not isinstance(image, str) or not image:
        raise PydanticCustomError(
            "image_data_type", "Input should be an address or base64, or a list of these"
        )
    return image


ImageData = Annotated[
    str | list[str] | list[list[str]],
    PlainValidator(_parse_images),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array", "items": {}}]}
    ),
]


class GenerateBody(WireModel):
    """Body of `POST /generate`: `text` or `input_ids`, one prompt or a list of prompts."""

    text: Texts | None = None
    input_ids: IdLists | None = None
    sampling_params: PerPrompt[NativeSampling] = Field(default=[NativeSampling()])
    rid: Rid | None = None
    stream: bool = False
    return_logprob: PerPrompt[bool] = Field(default=[False])
    logprob_start_len: PerPrompt[Annotated[Integer, Field(ge=-1, lt=2**31)]] = Field(default=[-1])
    top_logprobs_num: PerPrompt[Count] = Field(default=[0])
    return_text_in_logprobs: bool = False
    priority: Priority = 0

    input_embeds: Unsupported = None
    image_data: Annotated[
        ImageData,
        Field(description="addresses or base64: of the one prompt, or a list for each prompt"),
    ] = Field(default_factory=list)
    audio_data: Unsupported = None
    video_data: Unsupported = None
    token_ids_logprob: Unsupported = None
    lora_path: PerPrompt[AdapterName] = Field(default=[None])
    cache_salt: Annotated[Any, only(remedy="send it in sampling_params")] = None
    custom_logit_processor: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    return_entropy: Unsupported = None
    return_prompt_token_ids: Unsupported = None
    session_params: Unsupported = None
    modalities: Annotated[Any, only(["text"])] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise disagreement("text", "send either text or input_ids")
        if not self.prompts or not all(self.prompts):
            raise disagreement(
                "text" if self.input_ids is None else "input_ids",
                "the prompt, or one of them, is empty; send some text",
            )
        for name in _PER_PROMPT:
            if len(getattr(self, name)) not in (1, len(self.prompts)):
                raise PydanticCustomError(
                    "disagreement", "{param} should have one entry for each prompt", {"param": name}
                )
        images = [self.image_data] if isinstance(self.image_data, str) else self.image_data
        if images and self.input_ids is not None:
            raise disagreement("image_data", "images need text with a placeholder for each")
        is_each = images and (self.batch or isinstance(images[0], list))
        if is_each and len(images) != len(self.prompts):
            raise disagreement("image_data", "image_data should have one entry for each prompt")
        if isinstance(self.rid, list) and not len(self.rid) == len(set(self.rid)) == len(
            self.prompts
        ):
            raise disagreement("rid", "rid should have one entry for each prompt, all different")
        return self

    def images(self, index: int) -> list[ImagePart]:
        """Return the images of a prompt. In a plain list each prompt of several has one image."""
        images: str | Sequence[str | list[str]] = self.image_data
        param = "image_data"
        if images and not isinstance(images, str) and (self.batch or isinstance(images[0], list)):
            images, param = images[index], f"image_data[{index}]"
        if isinstance(images, str):
            return [image_of(images, param)]
        return [
            image_of(image, f"{param}[{place}]")
            for place, image in enumerate(images)
            if isinstance(image, str)
        ]

    @property
    def batch(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or (
            bool(self.input_ids)
            and isinstance(self.input_ids, list)
            and isinstance(self.input_ids[0], list)
        )

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.text is not None else self.input_ids
        return [*given] if self.batch else [given]


class AbortBody(WireModel):
    """Body of `POST /abort_request`: the `rid` of one request, or all requests."""

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _says_what(self) -> Self:
        if not self.rid and not self.abort_all:
            raise disagreement("rid", "send the rid of the request to abort, or abort_all")
        return self
