"""Models of the requests of llama.cpp's endpoints.

Names and meanings are those of https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.limits import MAX_LOGIT_BIASES, MAX_SEQUENCES
from ..core.parameters import LLAMA_CPP, Others
from ..core.schemas import (
    Count,
    Integer,
    Samples,
    Seed,
    Stops,
    Unsupported,
    WireModel,
    only,
    parse_integer,
)
from ..openai.requests import ChatOptions, Messages
from ..serving.structured import SchemaText

# A text, or token ids with texts between them.
Tokens = str | list[int | str]


class MediaPrompt(NamedTuple):
    """A text with `MARK` for each image. `images` are in base64."""

    text: str
    images: list[str]


Prompt = Tokens | MediaPrompt
MARK = "<__media__>"
MAX_FILES = 1024  # Maximum of `input_extra`.
_MAX_FIELDS, _MAX_FIELD_CHARS = 64, 256
_LARGEST = 10**300  # Larger integers are no floats.
_BAN = -100.0  # Bias of a token that is never sampled: the lowest of `SamplingParams`.


def parse_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a body, as a list.

    A list of numbers, or of numbers and texts, is one prompt. Any other list has one prompt in each
    item.
    """
    if not isinstance(value, list):
        return [_parse_prompt(value)]
    if any(type(part) in (int, float) for part in value):
        return [_parse_prompt(value)]
    if not 0 < len(value) <= MAX_SEQUENCES:
        raise PydanticCustomError(
            "too_many_sequences",
            "the request has {count} prompts, but a request has 1 to {most}",
            {"count": len(value), "most": MAX_SEQUENCES},
        )
    return [_parse_prompt(part) for part in value]


def _parse_prompt(value: Any) -> Prompt:
    if isinstance(value, dict):
        if images := value.get("multimodal_data"):
            return _media_prompt(value.get("prompt_string"), images)
        value = value.get("prompt_string")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [parse_integer(part) for part in value]
        if all(type(part) in (int, str) for part in parts):
            return parts
    raise PydanticCustomError(
        "prompt_type",
        "Input should be a text, a list of token ids and texts, or a list of such prompts",
    )


def _media_prompt(text: Any, images: Any) -> MediaPrompt:
    is_list = isinstance(images, list) and all(isinstance(image, str) for image in images)
    if not isinstance(text, str) or not is_list or text.count(MARK) != len(images):
        raise PydanticCustomError(
            "multimodal_data",
            "Input should be a prompt_string with {mark} for each text in base64 of "
            "multimodal_data",
            {"mark": MARK},
        )
    return MediaPrompt(text, images)


_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        {
            "type": "object",
            "properties": {
                "prompt_string": {"type": "string"},
                "multimodal_data": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["prompt_string"],
        },
    ]
}
Prompts = Annotated[
    list[Prompt],
    PlainValidator(parse_prompts),
    WithJsonSchema({"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT}]}),
]


def parse_biases(value: Any) -> list[tuple[int | str, float]]:
    """Return pairs of a token id or a text, and a bias.

    `false` bans a token. Biases beyond 100 have the effect of 100.
    """
    if isinstance(value, dict):
        pairs = [[int(key) if _is_id(key) else key, bias] for key, bias in value.items()]
    else:
        pairs = value
    if isinstance(pairs, list) and len(pairs) > MAX_LOGIT_BIASES:
        raise PydanticCustomError(
            "logit_bias_size", "at most {most} biases are taken", {"most": MAX_LOGIT_BIASES}
        )
    if not isinstance(pairs, list) or not all(map(_is_bias, pairs)):
        raise PydanticCustomError(
            "logit_bias_type",
            "Input should be a list of pairs of a token id or a text, and a number or false",
        )
    return [
        (token, _BAN if bias is False else min(max(float(bias), _BAN), -_BAN))
        for token, bias in pairs
    ]


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    token, bias = pair
    is_number = type(bias) is float or (type(bias) is int and abs(bias) < _LARGEST)
    return type(token) in (int, str) and (bias is False or is_number)


_BIAS = {"anyOf": [{"type": "number"}, {"const": False}]}
LogitBias = Annotated[
    list[tuple[int | str, float]],
    PlainValidator(parse_biases),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "array", "minItems": 2, "maxItems": 2},
                    "maxItems": MAX_LOGIT_BIASES,
                },
                {
                    "type": "object",
                    "additionalProperties": _BIAS,
                    "maxProperties": MAX_LOGIT_BIASES,
                },
            ]
        }
    ),
]


def _without_empty(value: Any) -> Any:
    return [stop for stop in value if stop != ""] if isinstance(value, list) else value


TokenLimit = Annotated[
    Integer, Field(ge=-2, lt=2**31, description="-1 or -2: what the context has room for")
]
FieldNames = Annotated[
    list[Annotated[str, Field(max_length=_MAX_FIELD_CHARS)]],
    FailFast(),
    Field(max_length=_MAX_FIELDS, description="members of the answer, such as `timings/prompt_n`"),
]


class GenerationBody(WireModel):
    """The parameters that `/completion` and `/infill` share."""

    others: ClassVar[Others] = LLAMA_CPP

    model: str | None = None
    temperature: float = 0.8
    top_k: Annotated[Integer, Field(ge=-(2**31), lt=2**31, description="0 or less: all tokens")] = (
        40
    )
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[Seed, Field(description="negative: random")] = -1
    n_predict: TokenLimit = -1
    max_tokens: Annotated[TokenLimit | None, Field(description="n_predict, if that is missing")] = (
        None
    )
    n_cmpl: Annotated[Samples, Field(description="completions of each prompt")] = 1
    n_probs: Annotated[
        Count, Field(description="alternatives of each token with their log-probabilities")
    ] = 0
    stop: Annotated[Stops, BeforeValidator(_without_empty)] = Field(default_factory=list)
    logit_bias: LogitBias = Field(default_factory=list)
    ignore_eos: bool = False
    grammar: Annotated[str, Field(description="a grammar in GBNF")] = ""
    json_schema: SchemaText | None = None
    stream: bool = False
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: FieldNames = Field(default_factory=list)

    post_sampling_probs: Unsupported = None
    lora: Unsupported = None
    n_indent: Annotated[Any, only(0)] = None

    @property
    def token_limit(self) -> int | None:
        """Upper limit of the new tokens of a sequence, or None for all that have room."""
        most = self.n_predict
        if self.max_tokens is not None and "n_predict" not in self.model_fields_set:
            most = self.max_tokens
        return None if most < 0 else most


class CompletionBody(GenerationBody):
    """Body of `POST /completion`."""

    prompt: Prompts


class ExtraFile(WireModel):
    """A text that the model reads before the gap."""

    filename: str = "tmp"
    text: str


class InfillBody(GenerationBody):
    """Body of `POST /infill`. The new text continues `prompt`."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], FailFast(), Field(max_length=MAX_FILES)] = Field(
        default_factory=list
    )
    prompt: str = ""


class TemplateBody(ChatOptions):
    """Body of `POST /apply-template`."""

    model: str | None = None
    messages: Annotated[Messages, Field(min_length=1)]
