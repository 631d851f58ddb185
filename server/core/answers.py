"""Declares the JSON of answers. One declaration encodes an answer and describes it in OpenAPI.

class Pong(Answer):
    text: str
    times: int | UnsetType = UNSET  # left out if it is not set

@router.get("/ping", responses=answers(Pong))
async def ping() -> Response:
    return json_response(Pong("pong"))
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from inspect import cleandoc
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType

LINES = "application/x-ndjson"  # Media type of answers of one JSON value in each line.
_REFERENCE = "#/components/schemas/"
_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
}
# Errors of endpoints that read a body and use the engine. 404: the model is unknown.
BODY_ERRORS = (400, 404, 413, 415, 500, 503)
_MEANINGS = {
    400: "A parameter is wrong or not supported.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    500: "The engine could not finish the request.",
    501: "This server does not offer it; the message says what to do instead.",
    529: "Not now: the queue is full, or too much else is under way.",
    503: "Not now: the queue is full, or the engine does not serve. Retry-After says when to try "
    "again.",
}


class Answer(msgspec.Struct, gc=False):
    """A JSON object. Members are encoded in the order of their declaration.

    Attributes:
        is_open: Whether the object has more members than the declared ones.
    """

    is_open: ClassVar[bool] = False


class ErrorDetail(Answer):
    """`retry_after` is in seconds. `phase` says what an engine does that does not serve yet."""

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after: int | UnsetType = UNSET
    phase: str | UnsetType = UNSET


class ErrorAnswer(Answer):
    """An error in OpenAI's format. `param` names the invalid parameter."""

    error: ErrorDetail


def answers(
    kind: Any = None,
    *,
    stream: Any = None,
    lines: Any = None,
    media: tuple[str, ...] = (),
    errors: tuple[int, ...] = (),
    error: Any = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route.

    They are JSON of the type `kind`, events with data of the type `stream`, lines of JSON of the
    type `lines`, or other `media` types, and the errors in the form of `error`.
    """
    content: dict[str, Any] = {name: {"schema": {"type": "string"}} for name in media}
    if kind is not None:
        content["application/json"] = {"schema": _with_definitions(kind)}
    if stream is not None:
        content["text/event-stream"] = {"schema": _with_definitions(stream)}
    if lines is not None:
        content[LINES] = {"schema": _with_definitions(lines)}
    failed = {"application/json": {"schema": _with_definitions(error)}}
    return {
        200: {"description": "Success." if stream is None else "Success; with `stream`, the data "
"of each event but `[DONE]`.",
              "content": content},
        **{status: {"description": _MEANINGS[status], "content": failed} for status in errors},
        "default": {"description": "Any other error.", "content": failed},
    }  # fmt: skip


def _with_definitions(kind: Any) -> dict[str, Any]:
    """Return a schema that contains those of its answers, until `describe` moves them."""
    found: dict[str, Any] = {}
    return {**schema_of(kind, found), "$defs": found}


def schema_of(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type. Add the schemas of its answers to `found`, by name.

    `msgspec.Raw` beside another type stands for this type, encoded.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        choices = [schema_of(part, found) for part in parts if part not in (UnsetType, msgspec.Raw)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if origin is Literal:
        return {"enum": [*parts]}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(parts[1], found)}
    if origin is tuple:
        items = [schema_of(part, found) for part in parts]
        bounds = {"minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "prefixItems": items, **bounds}
    if origin in (list, Sequence):
        return {"type": "array", "items": schema_of(parts[0], found)}
    if isinstance(kind, type) and issubclass(kind, Answer):
        if kind.__name__ not in found:
            found[kind.__name__] = {}  # The answer may contain itself.
            found[kind.__name__] = _object(kind, found)
        return {"$ref": _REFERENCE + kind.__name__}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    return dict(_TYPES[kind])


def _object(kind: type[Answer], found: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    members = {name: hints[name] for name in kind.__struct_fields__}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema_of(hint, found) for name, hint in members.items()},
        "required": [name for name, hint in members.items() if UnsetType not in get_args(hint)],
        "additionalProperties": kind.is_open,
    }
    return {**schema, "description": cleandoc(kind.__doc__)} if kind.__doc__ else schema


class Application(FastAPI):
    """An application whose OpenAPI document describes its answers.

    `state.needs_key` tells whether a path needs a key. `openapi` takes about a second, so call it
    in a thread.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            describe(super().openapi(), self.state.needs_key)
        assert self.openapi_schema is not None
        return self.openapi_schema


def describe(document: dict[str, Any], needs_key: Any) -> None:
    """Move schemas to the components, and mark the paths for which `needs_key` is true.

    Leave out schemas to which no operation leads: those of classes that clients do not send, but
    that validators with a JSON schema of their own return.
    """
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for response in operation["responses"].values():
                for content in response.get("content", {}).values():
                    schemas.update(content["schema"].pop("$defs", {}))
            if needs_key(path):
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = {
                    **operation["responses"]["default"],
                    "description": _MEANINGS[401],
                }
    used: set[str] = set()
    found = _referenced(document["paths"])
    while new := found - used:
        used |= new
        found = _referenced([schemas[name] for name in new])
    components["schemas"] = {name: schema for name, schema in schemas.items() if name in used}


def _referenced(part: Any) -> set[str]:
    """Return the names of the schemas to which a part of the document refers."""
    if not isinstance(part, dict | list):
        return set()
    names: set[str] = set()
    for value in part.values() if isinstance(part, dict) else part:
        if isinstance(value, str) and value.startswith(_REFERENCE):
            names.add(value.removeprefix(_REFERENCE))
        names |= _referenced(value)
    return names
