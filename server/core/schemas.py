"""What the wire models of all endpoint families have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, LiteralString, cast

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from .limits import (
    MAX_LOGIT_BIASES,
    MAX_SAMPLES,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from .parameters import Others, check_others

Prompt = str | list[int]  # Text, or token ids.
_PROMPT_TYPES = (
    "Input should be a string, a list of strings, a list of token ids or a list of such lists"
)


# Maps pydantic's names of bounds to JSON Schema's; pydantic keeps its own behind a
# `BeforeValidator`.
_KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_NULL = {"type": "null"}


class WireModel(BaseModel):
    """A JSON object as clients send it: types are exact, null means the default.

    Members that are neither fields nor in `others` are ignored.
    """

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    keeps_null: ClassVar[frozenset[str]] = frozenset()  # Members for which null is a value.
    others: ClassVar[Others] = {}  # Members that are known and not used.

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Declare what is taken: null for each member that may be left out, and every bound."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        required = schema.get("required", ())
        schema["properties"] = {
            name: _declared(member, takes_null=name not in required)
            for name, member in schema.get("properties", {}).items()
        }
        return reference

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError("not_an_object", "Input should be a JSON object")
        check_others(cls.others, data)
        return {
            name: value
            for name, value in data.items()
            if value is not None or name in cls.keeps_null
        }


def _declared(schema: JsonSchemaValue, *, takes_null: bool = False) -> JsonSchemaValue:
    """Return a member's schema in JSON Schema's own words."""
    named = {_KEYWORDS.get(name, name): value for name, value in schema.items()}
    if "items" in named:
        named["items"] = _declared(named["items"])
    if "anyOf" in named:
        named["anyOf"] = [_declared(choice) for choice in named["anyOf"]]
    if not takes_null:
        return named
    about: JsonSchemaValue = {
        name: named.pop(name) for name in ("title", "description", "default") if name in named
    }
    choices = named["anyOf"] if [*named] == ["anyOf"] else [named]
    return {"anyOf": [*(each for each in choices if each != _NULL), _NULL], **about}


def type_of(value: Any) -> Any:
    """Return the `type` of what a union of wire models is given: JSON of any kind, or a model."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def parse_prompts(value: Any) -> list[Prompt]:
    """Prompts in any of the four forms that OpenAI takes, as a list."""
    if isinstance(value, str):
        value = [value]
    elif (ids := _as_ids(value)) is not None:
        return [ids]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", _PROMPT_TYPES)
    _check_count(value)
    if not value:
        raise PydanticCustomError("empty_prompt", "the prompt is empty; send text or token ids")
    for index, part in enumerate(value):
        if part == "":
            raise PydanticCustomError(
                "empty_prompt", "prompt {index} is empty; send text or token ids", {"index": index}
            )
    if all(isinstance(part, str) for part in value):
        return value
    prompts = [ids for part in value if (ids := _as_ids(part)) is not None]
    if len(prompts) < len(value):
        raise PydanticCustomError("prompt_type", _PROMPT_TYPES)
    return [*prompts]


def _as_ids(value: Any) -> list[int] | None:
    """Token ids, of which there is at least one; None for anything else."""
    if (
        not isinstance(value, list)
        or not (kinds := set(map(type, value))) <= {int, float}
        or not kinds
    ):
        return None
    ids = value if kinds == {int} else [parse_integer(part) for part in value]
    return ids if all(type(part) is int for part in ids) else None


def _check_count(parts: Any) -> None:
    """Before each of them is looked at: there may be a million."""
    if isinstance(parts, list) and len(parts) > MAX_SEQUENCES:
        message = "the request has {count} prompts, more than {most}; send several requests"
        raise PydanticCustomError(
            "too_many_sequences", message, {"count": len(parts), "most": MAX_SEQUENCES}
        )


def parse_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise PydanticCustomError(
            "too_many_stops", "at most {most} stop strings are taken", {"most": MAX_STOP_STRINGS}
        )
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError(
            "stop_length", "a stop string has 1 to {most} characters", {"most": MAX_STOP_LENGTH}
        )
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise PydanticCustomError(
            "stop_length",
            "all stop strings together have at most {most} characters",
            {"most": MAX_STOP_CHARS},
        )
    return stops


def parse_logit_bias(value: Any) -> dict[int, float]:
    """Biases by token id; JSON has the ids as strings."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError(
            "logit_bias_size", "at most {most} biases are taken", {"most": MAX_LOGIT_BIASES}
        )
    if not isinstance(value, dict) or not all(
        type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()
    ):
        raise PydanticCustomError(
            "logit_bias_type",
            "Input should be an object that gives token ids a number between -100 and 100 each",
        )
    if not all(token.isascii() and token.isdecimal() and len(token) < 20 for token in value):
        raise PydanticCustomError(
            "logit_bias_key", 'its members should be named by token ids, such as "42"'
        )
    return {int(token): float(bias) for token, bias in value.items()}


def parse_texts(value: Any) -> str | list[str]:
    """A text or a list of texts, as it is."""
    _check_count(value)
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(part, str) for part in value)
    ):
        return value
    raise PydanticCustomError("text_type", "Input should be a string or a list of strings")


def parse_id_lists(value: Any) -> list[int] | list[list[int]]:
    """Token ids or a list of lists of them, as it is."""
    ids = [] if value == [] else _as_ids(value)
    if ids is not None:
        return ids
    _check_count(value)
    lists = (
        [part if part == [] else _as_ids(part) for part in value]
        if isinstance(value, list)
        else [None]
    )
    if None not in lists:
        return cast("list[list[int]]", lists)
    raise PydanticCustomError(
        "token_ids_type", "Input should be a list of token ids or a list of such lists"
    )


def parse_integer(value: Any) -> Any:
    """A whole number that is written as 2.0 is an integer too, as in JSON Schema."""
    return int(value) if type(value) is float and value.is_integer() else value


def disagreement(param: str, message: LiteralString) -> PydanticCustomError:
    """The error of parameters that do not go together; `param` is the one to blame."""
    return PydanticCustomError("disagreement", message, {"param": param})


def _refuse(value: Any) -> Any:
    if value:
        raise PydanticCustomError(
            "unsupported_parameter", "this server does not support it; leave it out"
        )
    return value


class Refuses(AfterValidator):
    """Marks a member that takes no value, or none that changes the answer."""


# A member that would change the answer and is not supported: only an empty value is accepted.
Unsupported = Annotated[Any, Refuses(_refuse)]


def only(*values: Any, remedy: str = "leave it out") -> Refuses:
    """Makes `Any` a member of which only the values are taken that change nothing, and an empty
    one.
    """
    shown = " or ".join(str(pydantic_core.to_json(value), "utf-8") for value in values)
    message = (
        f"this server supports {shown} alone; {remedy}"
        if shown
        else f"this server does not support it; {remedy}"
    )

    def check(value: Any) -> Any:
        # 0 is a number that asks for something, though it equals False.
        if value not in (None, "", [], {}) and value is not False and value not in values:
            raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})
        return value

    return Refuses(check)


_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_TEXT = {"type": "string", "minLength": 1}
_STOP = {**_TEXT, "maxLength": MAX_STOP_LENGTH}


def _some(items: JsonSchemaValue, most: int) -> JsonSchemaValue:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


Prompts = Annotated[
    list[Prompt],
    PlainValidator(parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _some(_TEXT, MAX_SEQUENCES),
                {**_IDS, "minItems": 1},
                _some({**_IDS, "minItems": 1}, MAX_SEQUENCES),
            ]
        }
    ),
]
Texts = Annotated[
    str | list[str],
    PlainValidator(parse_texts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS]}),
]
IdLists = Annotated[
    list[int] | list[list[int]],
    PlainValidator(parse_id_lists),
    WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS}]}),
]
Stops = Annotated[
    list[str],
    PlainValidator(parse_stops),
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(parse_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "maxProperties": MAX_LOGIT_BIASES,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Integer = Annotated[int, BeforeValidator(parse_integer)]
TokenIds = Annotated[list[Integer], FailFast(), Field(max_length=MAX_STOP_TOKEN_IDS)]
Samples = Annotated[Integer, Field(ge=1, le=MAX_SAMPLES)]
Seed = Annotated[Integer, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[Integer, Field(ge=0, lt=2**31)]
Priority = Annotated[Integer, Field(ge=-(2**31), lt=2**31)]  # Higher runs first.

CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=256,
        description="only requests with the same salt share cached prefixes",
    ),
]

AdapterName = Annotated[
    str | None,
    Field(min_length=1, max_length=256, description="name of an adapter (LoRA) of the model"),
]

# OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="texts under names, for the client's own use"),
]


# OpenAI's names of tiers. This server has one tier, which answers call "default".
ServiceTier = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"],
    Field(description="has no effect: this server has one tier"),
]


class SamplingFields(WireModel):
    """How to sample, as far as endpoint families call it the same."""

    n: Samples = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[Integer, Field(ge=-1, lt=2**31, description="-1 or 0: all tokens")] = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: LogitBias = Field(default_factory=dict)
    cache_salt: CacheSalt = None
