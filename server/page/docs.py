"""`GET /docs`: renders `/openapi.json` as one HTML page without scripts or external files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

router = APIRouter()
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_SCHEMAS = "#/components/schemas/"
_LIMITS = {
    "minimum": "≥",
    "maximum": "≤",
    "exclusiveMinimum": ">",
    "exclusiveMaximum": "<",
    "minItems": "items ≥",
    "maxItems": "items ≤",
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8884; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer }
code, b { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { border-top: 1px solid #8884; padding: .25rem .6rem .25rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere }
"""


class Description(NamedTuple):
    """The OpenAPI document of an application as JSON, and the page made from it."""

    document: bytes
    page: bytes


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response((await _described(request.app)).document, media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Return the documentation of the endpoints and their bodies as HTML."""
    page = (await _described(request.app)).page
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


async def _described(app: FastAPI) -> Description:
    """Return the description. The first request makes it in a thread."""
    made: asyncio.Future[Description] | None = getattr(app.state, "description", None)
    if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
        made = app.state.description = asyncio.ensure_future(asyncio.to_thread(_describe, app))
    return await asyncio.shield(made)


def _describe(app: FastAPI) -> Description:
    found = app.openapi()
    return Description(msgspec.json.encode(found), render(found).encode())


def render(document: dict[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    operations = (
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = document.get("components", {}).get("schemas", {})
    objects = (
        f'<details id="{escape(name)}"><summary><b>{escape(name)}</b></summary>'
        f"{_object(schema)}</details>"
        for name, schema in sorted(schemas.items())
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info.get('description', ''))}. "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Endpoints</h2>{''.join(operations)}<h2>Objects</h2>{''.join(objects)}</html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    key = (
        " A key is needed: <code>Authorization: Bearer KEY</code>."
        if operation.get("security")
        else ""
    )
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    asked = f"<p>Body: {_type(body['schema'])}</p>" if body is not None else ""
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code><td>{escape(response['description'])}"
        f"<td>{_content(response)}"
        for status, response in sorted(operation["responses"].items())
    )
    return (
        f"<details><summary><b>{method.upper()} {escape(path)}</b> "
        f"{escape(operation.get('summary', ''))}</summary>"
        f"<p>{escape(operation.get('description', ''))}{key}</p>{asked}"
        f"<table>{rows}</table></details>"
    )


def _content(response: dict[str, Any]) -> str:
    parts = (
        f"<code>{escape(kind)}</code>: {_type(content['schema'])}"
        for kind, content in response.get("content", {}).items()
    )
    return "<br>".join(parts)


def _object(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}"
        f"<td>{_type(member)}<td>{_remarks(member)}"
        for name, member in schema.get("properties", {}).items()
    )
    return f"<p>{escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _remarks(member: dict[str, Any]) -> str:
    """Return limits, default and description of a field."""

    def found() -> Iterator[str]:
        yield from (f"{sign} {member[name]}" for name, sign in _LIMITS.items() if name in member)
        if member.get("default") not in (None, [], {}):
            yield f"default: {json.dumps(member['default'], ensure_ascii=False)}"
        if "description" in member:
            yield member["description"]

    return escape("; ".join(found()))


def _type(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in words, with links to its objects."""
    match schema:
        case {"$ref": str(reference)}:
            name = escape(reference.removeprefix(_SCHEMAS))
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": list(kinds)} | {"oneOf": list(kinds)}:
            return " or ".join(map(_type, kinds))
        case {"const": value}:
            return f"<code>{escape(json.dumps(value))}</code>"
        case {"enum": list(values)}:
            return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
        case {"type": "array", "prefixItems": list(kinds)}:
            return f"[{', '.join(map(_type, kinds))}]"
        case {"type": "array"}:
            return f"list of {_type(schema.get('items', {}))}"
        case {"type": "object", "additionalProperties": dict(kind)}:
            return f"object of {_type(kind)}"
    return escape(str(schema.get("type", "anything")))
