"""Holds what goes over the wire to what `/openapi.json` declares."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
from http_fixtures import events, make_app, validate
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer


@cache
def default_document() -> dict[str, Any]:
    """What a server without flags declares: it takes longer to make than all else in most tests."""
    made: dict[str, Any] = json.loads(
        json.dumps(make_app(ScriptedEngine(toy_tokenizer())).openapi())
    )
    return made


def check_answer(
    document: dict[str, Any], method: str, path: str, response: httpx.Response
) -> None:
    """The status, the content type and the body are declared for the operation; `path` is as the
    document has it.
    """
    operation = document["paths"][path][method.lower()]
    declared = operation["responses"][str(response.status_code)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    schema = declared[kind]["schema"]
    match kind:
        case "text/event-stream":
            for data in events(response):
                validate(document, schema, data)
        case "application/x-ndjson":
            for line in response.text.splitlines():
                validate(document, schema, json.loads(line))
        case "application/json":
            validate(document, schema, response.json())
        case _:
            assert schema == {"type": "string"}


def check_request(document: dict[str, Any], method: str, path: str, body: Any) -> None:
    content = document["paths"][path][method.lower()]["requestBody"]["content"]
    validate(document, content["application/json"]["schema"], json.loads(json.dumps(body)))


# Bodies of llama.cpp's endpoints, whose answers are held to the document.
LLAMA_CPP_BODIES: list[tuple[str, str, Any]] = [
    *(
        ("POST", path, body)
        for path in ("/completion", "/completions")
        for body in (
            {"prompt": "Hello", "n_predict": 3, "n_probs": 2},
            {"prompt": ["Hello", [5, "a"]], "n_predict": 3, "logit_bias": [[5, 1], ["a", False]]},
            {"prompt": {"prompt_string": "a"}, "n_predict": 3, "stream": True, "n_probs": 1},
            {"prompt": "a", "n_predict": 3, "response_fields": ["content", "timings/prompt_n"]},
        )
    ),
    ("POST", "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]}),
]

SWITCHED_ON = [
    *(("POST", f"/{name}") for name in ("sleep", "wake_up", "release_memory_occupation")),
    *(("POST", f"/{name}") for name in ("resume_memory_occupation", "pause_generation")),
    *(("POST", f"/{name}") for name in ("continue_generation", "update_weights_from_disk")),
    ("POST", "/get_weights_by_name"),
    *(
        ("POST", f"{place}/{does}_lora_adapter")
        for place in ("", "/v1")
        for does in ("load", "unload")
    ),
]
"""Endpoints that a flag turns on: tests/server/native/test_residence.py, test_adapters.py."""

NOT_OFFERED = [
    *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy", "blobs/{digest}")),
    ("DELETE", "/api/delete"),
    ("GET", "/api/blobs/{digest}"),
]
