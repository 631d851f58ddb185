"""Declares the JSON of answers for `/openapi.json`.

The models are only declarations. Tests compare them with real answers.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

_REFERENCE = "#/components/schemas/{model}"
# Errors of endpoints that read a body and use the engine. 404: the model is unknown.
BODY_ERRORS = (400, 404, 413, 415, 500, 503)
_MEANINGS = {
    400: "A parameter is wrong or not supported.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    500: "The engine could not finish the request.",
    529: "Not now: the queue is full, or too much else is under way.",
    503: "Not now: the queue is full, or the engine does not serve. Retry-After says when to try "
    "again.",
}


class Answer(BaseModel):
    """A JSON object with exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """An error in OpenAI's format. `param` names the invalid parameter."""

    error: ErrorDetail


class Health(Answer):
    """The health of a server. `replicas` has their states if some do not serve."""

    status: str
    replicas: list[str] = Field(default_factory=list)


class Version(Answer):
    version: str


def answers(
    model: Any = None,
    *,
    stream: Any = None,
    media: tuple[str, ...] = (),
    errors: tuple[int, ...] = (),
    error: Any = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route.

    They are JSON of `model`, events with data of `stream`, or other `media` types, and the errors
    in the form of `error`.
    """
    content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in media}
    if model is not None:
        content["application/json"] = {"schema": _schema(model)}
    if stream is not None:
        content["text/event-stream"] = {"schema": _schema(stream)}
    failed = {"application/json": {"schema": _schema(error)}}
    return {
        200: {"description": "Success." if stream is None else "Success; with `stream`, the data "
"of each event but `[DONE]`.",
              "content": content},
        **{status: {"description": _MEANINGS[status], "content": failed} for status in errors},
        "default": {"description": "Any other error.", "content": failed},
    }  # fmt: skip


def _schema(model: Any) -> dict[str, Any]:
    """Return a reference that contains the schema, until `describe` moves the schema."""
    schema = TypeAdapter(model).json_schema(ref_template=_REFERENCE)
    defined = schema.pop("$defs", {})
    if not isinstance(model, type):
        return {**schema, "$defs": defined}
    return {
        "$ref": _REFERENCE.format(model=model.__name__),
        "$defs": {**defined, model.__name__: schema},
    }


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
    """Move schemas to the components, and mark the paths for which `needs_key` is true."""
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
