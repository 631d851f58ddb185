"""What tests of the HTTP surface share: the application over a scripted engine, in process or
behind a real uvicorn.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from fastapi import FastAPI, routing
from fastapi.dependencies.models import Dependant
from jsonschema import Draft202012Validator
from scripted_engine import ScriptedEngine

from piecework.cli.core.flags import ServerConfig
from piecework.kernels.cache_folder import cache_folder
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.sampling.defaults import SamplingDefaults
from piecework.server.app import create_app
from piecework.server.core.answers import LINES
from piecework.server.core.ollama_errors import is_ollama
from piecework.server.fleet.dispatch import MemberRoute
from piecework.server.media.media import Media
from piecework.server.media.process import Preprocessor

MODEL = "toy"


def make_app(
    engine: ScriptedEngine,
    *,
    defaults: SamplingDefaults | None = None,
    preprocessor: Preprocessor | None = None,
    **settings: Any,
) -> FastAPI:
    """`preprocessor` reads images; without it the model reads only text.

    Each application has stores of its own, as one store serves one application at a time.
    """
    stores = {"responses_store": "memory", "batch_dir": str(cache_folder() / f"own-{uuid4()}")}
    config = ServerConfig(
        served_model_name=MODEL,
        engine=EngineConfig(model_path="models/toy"),
        **{**stores, **settings},
    )
    media = None if preprocessor is None else Media(config, preprocessor)
    return create_app(engine, config, defaults, media=media)


def client_of(app: FastAPI, **settings: Any) -> httpx.AsyncClient:
    """A client that calls the application in process.

    An exception in the application is raised here. JSON that `/openapi.json` does not declare
    raises `jsonschema.ValidationError`.
    """
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test", timeout=30, **settings
    )
    client.event_hooks["response"].append(partial(_check_json, app))
    return client


async def _check_json(app: FastAPI, response: httpx.Response) -> None:
    """Validate each JSON value of a response, also those of events, by the application's schema."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind not in ("application/json", "text/event-stream", LINES):
        return
    await response.aread()
    if not response.content:
        return
    method, path = response.request.method.lower(), response.request.url.path
    if path == "/openapi.json":
        return
    document = _document(app)
    patterns = {name: re.sub(r"\\{\w+\\}", ".+", re.escape(name)) for name in document["paths"]}
    found = [
        name
        for name in sorted(patterns, key=lambda name: ("{" in name, -len(name)))
        if re.fullmatch(patterns[name], path)
    ]
    # The errors of other methods have the format of the path. Those of unknown paths have one of
    # the formats of the models' endpoint.
    paths = [document["paths"][name] for name in found]
    models = "/api/tags" if is_ollama(path) else "/v1/models"
    operation = next(
        (operations[method] for operations in paths if method in operations),
        next(iter(paths[0].values())) if paths else document["paths"][models]["get"],
    )
    declared = operation["responses"]
    content = declared.get(str(response.status_code), declared["default"])["content"]
    if kind == "application/json":
        validate(document, content[kind]["schema"], response.json())
        return
    if kind == LINES:
        for line in response.text.splitlines():
            validate(document, content[kind]["schema"], json.loads(line))
        return
    for line in response.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            validate(document, content[kind]["schema"], json.loads(line[6:]))


_documents: dict[frozenset[Any], dict[str, Any]] = {}


def _document(app: FastAPI) -> dict[str, Any]:
    """The document of an application; applications of the same routers declare the same, and fleets
    of the same kinds of models.
    """
    routers = frozenset(
        frozenset(route._routes)
        if isinstance(route, MemberRoute)
        else id(getattr(route, "original_router", route))
        for route in app.routes
    )
    if routers not in _documents:
        _documents[routers] = json.loads(json.dumps(app.openapi()))
    return _documents[routers]


def _keep_parameters() -> None:
    """Have FastAPI find out the parameters of an endpoint once. It does so for each application,
    which takes most of the time of a test that makes one and sends it a request.
    """
    found: dict[Any, Dependant] = {}
    find = routing.get_dependant

    def kept(**asked: Any) -> Dependant:
        key = tuple(sorted(asked.items(), key=lambda each: each[0]))
        if key not in found:
            found[key] = find(**asked)
        # FastAPI puts the dependencies of a router in front of those of the endpoint.
        return replace(found[key], dependencies=[*found[key].dependencies])

    setattr(routing, "get_dependant", kept)  # noqa: B010


_keep_parameters()


def validate(document: dict[str, Any], part: dict[str, Any], value: Any) -> None:
    """Raises for a value that a schema inside of the document does not allow."""
    Draft202012Validator({**part, "components": document["components"]}).validate(value)


@contextlib.contextmanager
def serve(app: FastAPI, port: int = 0) -> Iterator[str]:
    """The application behind uvicorn, by default on a free port; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def post(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request by hand; returns the connection."""
    content = json.dumps(body).encode()
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until `condition` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events; `[DONE]` must be the last, and is left out. Named events end
    without it, and llama.cpp's end with a piece that has `stop`.
    """
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    if parts[0].startswith("event: "):
        data = [json.loads(part.partition("\ndata: ")[2]) for part in parts]
        assert [f"event: {one['type']}" for one in data] == [
            part.partition("\n")[0] for part in parts
        ]
        return data
    assert all(part.startswith("data: ") for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    if data[-1] == "[DONE]":
        return [json.loads(part) for part in data[:-1]]
    found = [json.loads(part) for part in data]
    assert found[-1].get("stop") is True or "error" in found[-1]
    return found


def error_of(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error object of an answer in OpenAI's shape, with this status and this parameter."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) - {"retry_after", "phase"} == {"message", "type", "param", "code"}
    assert ("retry_after" in error) == (status == 503)
    assert error["message"] and isinstance(error["type"], str)
    assert error["param"] == param, error
    return error
