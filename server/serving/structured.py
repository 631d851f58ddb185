"""Structured outputs: the formats under OpenAI's, vLLM's and SGLang's names become one grammar."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, ValidationError

from ...runtime.sampling import grammar, grammar_process
from ..core.errors import InvalidRequest, Unavailable, from_validation
from ..core.schemas import WireModel
from .state import Serving

_KEPT_CHARS = 4 * 2**20  # Upper limit for `_kept`.
# Grammars that have been checked, by a hash of the requested format.
_kept: OrderedDict[bytes, str] = OrderedDict()
ANY_OBJECT = {"type": "object"}

SchemaText = Annotated[
    str | dict[str, Any], Field(description="a JSON schema, as an object or as its text")
]


class JsonSchemaFormat(WireModel):
    """`json_schema` of a `response_format`.

    If it is not `strict`, keywords that grammars do not support are ignored.
    """

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(
        default_factory=lambda: dict(ANY_OBJECT)
    )
    strict: bool | None = None


class Structure(WireModel):
    """One structure of a structural tag: after `begin`, the text follows the schema, then `end`."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(
        default_factory=lambda: dict(ANY_OBJECT)
    )
    end: str = ""


class StructuralTag(WireModel):
    """SGLang's structural tag: free text, in which a structure must follow after each trigger."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=128)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=128)]


class ResponseFormat(WireModel):
    """OpenAI's `response_format`. The type `structural_tag` is SGLang's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: JsonSchemaFormat | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(WireModel):
    """vLLM's `structured_outputs`."""

    json_: Annotated[SchemaText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class StructuredFields(WireModel):
    """SGLang's members, which all endpoint families have."""

    json_schema: SchemaText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class OpenAIStructuredFields(StructuredFields):
    """The members of OpenAI and vLLM, beside SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


async def grammar_of(serving: Serving, fields: StructuredFields) -> str | None:
    """Return the checked grammar that a request asks for, or None if it asks for none.

    Raise `InvalidRequest` with the library's reason.
    """
    asked = list(_asked(fields))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _, _ in asked)
        raise InvalidRequest(
            f"{names} ask for several forms of one text; send one of them.",
            param=asked[1][0],
            code="invalid_value",
        )
    ((param, kind, value),) = asked
    return await made_grammar(serving, param, kind, value)


async def made_grammar(serving: Serving, param: str, kind: str, value: Any) -> str:
    """Return the grammar that `param` describes. `kind` is a key of `_MAKERS`.

    Raise `InvalidRequest` or `Unavailable`.
    """
    try:
        key: bytes | None = None

        def make() -> tuple[str, int | None]:
            nonlocal key
            content = json.dumps(value)
            grammar.check_length(content)
            key = hashlib.sha256(f"{kind} {content}".encode()).digest()
            if (known := _kept.get(key)) is not None:
                return known, None
            return _made(kind, content), _last_id(kind, value)

        made = await grammar_process.made(make)
        if key is not None:
            _keep(key, made)
        return made
    except grammar_process.CheckUnavailable as error:
        raise Unavailable(
            f"{param}: the grammar cannot be checked now, because {error}. Try again in 1 s.",
            param=param,
            code="grammar_check_unavailable",
            headers={"Retry-After": "1"},
        ) from None
    except ValidationError as error:
        reason = from_validation(error.errors()).message.removesuffix(".")
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
    raise InvalidRequest(
        f"{param}: {reason}; mend it, or leave it out.", param=param, code=grammar.INVALID_GRAMMAR
    )


def json_schema_of(fields: StructuredFields) -> dict[str, Any] | None:
    """Return the JSON schema that a request demands for its text, or None."""
    kinds = [(kind, value) for _, kind, value in _asked(fields)]
    for kind, value in kinds:
        if kind in ("json", "strict_json"):
            schema = pydantic_core.from_json(value) if isinstance(value, str) else value
            return schema if isinstance(schema, dict) else None
    return None


def _asked(fields: StructuredFields) -> Iterator[tuple[str, str, Any]]:
    """Yield (parameter, kind of grammar, value) of each member that is set."""
    for param, kind in (
        ("json_schema", "json"),
        ("regex", "regex"),
        ("ebnf", "ebnf"),
        ("structural_tag", "structural_tag"),
    ):
        if (value := getattr(fields, param)) is not None:
            yield param, kind, value
    if not isinstance(fields, OpenAIStructuredFields):
        return
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(fields, f"guided_{kind}")) is not None:
            yield f"guided_{kind}", kind, value
    if (outputs := fields.structured_outputs) is not None:
        for kind in ("regex", "choice", "grammar", "structural_tag"):
            if (value := getattr(outputs, kind)) is not None:
                yield f"structured_outputs.{kind}", kind, value
        if outputs.json_ is not None:
            yield "structured_outputs.json", "json", outputs.json_
        if outputs.json_object:
            yield "structured_outputs.json_object", "json", ANY_OBJECT
    form = fields.response_format
    match form and form.type:
        case "json_object":
            yield "response_format", "json", ANY_OBJECT
        case "json_schema":
            assert form is not None
            if form.json_schema is None:
                raise InvalidRequest(
                    "response_format: the type json_schema needs a json_schema.",
                    param="response_format.json_schema",
                    code="missing_required_parameter",
                )
            asked = form.json_schema
            kind = "strict_json" if asked.strict else "json"
            yield "response_format.json_schema", kind, asked.schema_
        case "structural_tag":
            assert form is not None
            yield "response_format", "structural_tag", form.model_dump(by_alias=True)


def _from_json(schema: Any) -> str:
    return grammar.from_json_schema(
        pydantic_core.from_json(schema) if isinstance(schema, str) else schema, strict=False
    )


def _from_strict_json(schema: Any) -> str:
    return grammar.from_json_schema(schema, closed=True)


def _from_structural_tag(tag: Any) -> str:
    found = (
        StructuralTag.model_validate_json(tag)
        if isinstance(tag, str)
        else StructuralTag.model_validate(tag)
    )
    return grammar.from_structural_tag(
        [(each.begin, each.schema_, each.end) for each in found.structures], found.triggers
    )


_MAKERS: Mapping[str, Callable[[Any], str]] = {
    "json": _from_json,
    "strict_json": _from_strict_json,
    "regex": grammar.from_regex,
    "choice": grammar.from_choice,
    "ebnf": lambda text: _from_ebnf(text),
    "calls": lambda made: grammar.from_lark(*made),
    "grammar": lambda text: _from_ebnf(text),
    "structural_tag": _from_structural_tag,
}


def _made(kind: str, content: str) -> str:
    """Return a grammar that has not been checked. `content` is JSON."""
    with grammar.unchecked():
        return _MAKERS[kind](json.loads(content))


def _last_id(kind: str, value: Any) -> int:
    """Return the highest token id that a grammar names."""
    return max(value[1], default=0) if kind == "calls" else 0


def _without_comments(text: str) -> str:
    """Return a grammar without the lines that are comments of Lark."""
    if "//" not in text:
        return text
    return "".join([each for each in text.splitlines(True) if not each.lstrip().startswith("//")])


def _from_ebnf(text: str) -> str:
    return grammar.from_ebnf(_without_comments(text))


def _keep(key: bytes, made: str) -> None:
    _kept[key] = made
    while sum(map(len, _kept.values())) > _KEPT_CHARS:
        _kept.popitem(last=False)
