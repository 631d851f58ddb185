"""`/openapi.json` declares what is asked and answered, and `/docs` shows it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from declared import (
    LLAMA_CPP_BODIES,
    NOT_OFFERED,
    SWITCHED_ON,
    check_answer,
    check_request,
    default_document,
)
from fastapi.routing import APIRoute
from http_fixtures import MODEL, client_of, make_app, validate
from jsonschema.validators import SPECIFICATIONS
from scripted_engine import ScriptedEngine

from piecework.server.app import TEXT_ROUTERS
from piecework.server.core.open_paths import PAGE_FOLDER
from piecework.server.engine.supervisor import EngineState
from piecework.server.fleet import endpoints
from piecework.server.image_service import IMAGE_ROUTERS
from piecework.server.openai.batches.records import Status
from piecework.server.page import files as page_files
from piecework.server.page.docs import render
from piecework.server.pooling_service import POOLING_ROUTERS
from piecework.server.speech_service import SPEECH_ROUTERS

USER = {"role": "user", "content": "Hi"}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
STREAMED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
GOOD: list[tuple[str, str, Any]] = [
    ("POST", CHAT, {"messages": [USER], "max_tokens": 3}),
    (
        "POST",
        CHAT,
        {
            "messages": [USER],
            "max_tokens": 3,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": 0,
            "stop": ["x"],
        },
    ),
    ("POST", CHAT, {"messages": [USER], "max_tokens": 3, "logprobs": True, "n": 2, **STREAMED}),
    (
        "POST",
        CHAT,
        {
            "messages": [USER, {"role": "assistant", "content": None, "refusal": "No."}],
            "max_tokens": 3,
            "stream": True,
        },
    ),
    ("POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 3}),
    (
        "POST",
        COMPLETIONS,
        {
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "logprobs": 2,
            "echo": True,
            "logit_bias": {"5": 1},
        },
    ),
    (
        "POST",
        COMPLETIONS,
        {"prompt": [5, 6], "max_tokens": 3, "logprobs": 2, "echo": True, **STREAMED},
    ),
    ("POST", GENERATE, {"text": "Hello"}),
    (
        "POST",
        GENERATE,
        {"text": "Hello", "sampling_params": {"max_new_tokens": 3, "stop": ["there"]}, "rid": "a"},
    ),
    (
        "POST",
        GENERATE,
        {
            "input_ids": [[5], [6]],
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": None}],
        },
    ),
    (
        "POST",
        GENERATE,
        {
            "text": ["a", "b"],
            "return_logprob": True,
            "stream": True,
            "sampling_params": {"max_new_tokens": 3},
        },
    ),
    *LLAMA_CPP_BODIES,
    ("POST", RESPONSES, {"model": MODEL, "input": "Hello"}),
    (
        "POST",
        RESPONSES,
        {
            "model": MODEL,
            "input": [USER],
            "top_logprobs": 1,
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": "none",
            "text": {"format": {"type": "json_object"}},
            "max_output_tokens": 3,
        },
    ),
    ("POST", RESPONSES, {"model": MODEL, "input": "Hello", "stream": True}),
    ("POST", f"{RESPONSES}/input_tokens", {"model": MODEL, "input": "Hello"}),
    ("POST", f"{RESPONSES}/compact", {"model": MODEL, "input": "Hello"}),
    ("GET", CHAT, None),
    ("POST", MESSAGES, {"messages": [USER], "max_tokens": 3, "system": "Be kind."}),
    ("POST", MESSAGES, {"messages": [USER], "max_tokens": 3, "stream": True}),
    ("POST", f"{MESSAGES}/count_tokens", {"messages": [USER]}),
    ("POST", "/v1/responses/{response_id}/cancel", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    *(
        ("POST", prefix + path, body)
        for prefix in ("/v1", "")
        for path, body in (
            ("/tokenize", {"prompt": "Hello"}),
            ("/tokenize", {"prompt": ["Hello", "a"]}),
            ("/tokenize", {"messages": [USER]}),
            ("/tokenize", {"content": "Hello 媽", "with_pieces": True}),
            ("/detokenize", {"tokens": [5, 6]}),
            ("/detokenize", {"tokens": [[5], [6]]}),
        )
    ),
    ("POST", "/api/chat", {"model": MODEL, "messages": [USER], "options": {"num_predict": 3}}),
    (
        "POST",
        "/api/chat",
        {
            "model": MODEL,
            "messages": [USER],
            "stream": False,
            "logprobs": True,
            "top_logprobs": 2,
            "think": False,
            "format": "",
            "options": {"num_predict": 3, "seed": -1, "stop": ["x"]},
        },
    ),
    ("POST", "/api/generate", {"model": MODEL, "prompt": "Hi", "options": {"num_predict": 3}}),
    ("POST", "/api/generate", {"model": MODEL, "prompt": "Hi", "raw": True, "stream": False}),
    ("POST", "/api/show", {"model": MODEL}),
    ("POST", "/abort_request", {"rid": "none"}),
    ("PUT", GENERATE, {"text": "Hello", "sampling_params": {"stop": None}}),
    ("POST", "/flush_cache", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/ping", None),
    *(
        ("GET", path, None)
        for path in (
            "/v1/models",
            "/v1/models/{model_id}",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/input_items",
            "/health",
            "/live",
            "/ready",
            "/health_generate",
            "/metrics",
            "/v1/status",
            "/v1/health",
            "/ping",
            "/flush_cache",
            "/tokenizer_info",
            "/version",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/v1/loads",
            "/props",
            "/slots",
            "/get_load",
            "/get_server_info",
            "/api/tags",
            "/api/ps",
            "/api/version",
        )
    ),
]


async def document_of(client: httpx.AsyncClient) -> dict[str, Any]:
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


async def ask(client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
    if "{response_id}" in path:
        asked = {"model": MODEL, "input": "Hello", "background": True, "max_output_tokens": 1}
        path = path.replace(
            "{response_id}", (await client.post(RESPONSES, json=asked)).json()["id"]
        )
    return await client.request(method, path.replace("{model_id}", "toy"), json=body)


@pytest.mark.parametrize(("method", "path", "body"), GOOD, ids=str)
async def test_answers_are_as_declared(
    client: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    document = default_document()
    response = await ask(client, method, path, body)
    assert response.status_code == 200, response.text
    check_answer(document, method, path, response)
    if body is not None:
        check_request(document, method, path, body)


def test_answers_of_every_operation_are_held_to_the_document() -> None:
    declared = {
        (method.upper(), path)
        for path, operations in default_document()["paths"].items()
        for method in operations
    }
    answered = {(method, path) for method, path, _ in GOOD} | {*IN_ORDER, *PROFILES}
    # Models of tests/server/llama_cpp have the tokens that /infill needs.
    others = {("POST", "/infill"), ("POST", "/v1/moderations")}
    others |= {one for one in declared if one[1].startswith(("/v1/conversations", CHAT + "/"))}
    assert declared == answered | others | {*NOT_OFFERED} | {*SWITCHED_ON}


async def test_what_is_not_offered_is_declared_and_names_the_remedy(
    client: httpx.AsyncClient,
) -> None:
    for method, path in NOT_OFFERED:
        answer = await client.request(method, path, content=b"x")
        assert answer.status_code == 501 and "piecework pull" in answer.json()["error"]
        check_answer(default_document(), method, path, answer)
        assert "200" not in default_document()["paths"][path][method.lower()]["responses"]


def test_every_path_that_is_answered_is_declared_but_for_pages() -> None:
    fleet = (endpoints.router, endpoints.body_router, page_files.router)
    routers = (*TEXT_ROUTERS, *POOLING_ROUTERS, *IMAGE_ROUTERS, *SPEECH_ROUTERS, *fleet)
    hidden = {
        route.path
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and not route.include_in_schema
    }
    assert hidden == {"/", "/openapi.json", "/docs", f"{PAGE_FOLDER}{{name}}"}


PROFILES = [("POST", "/start_profile"), ("POST", "/stop_profile")]
"""Which need a folder."""


async def test_profiles_are_as_declared(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with client_of(make_app(scripted, profile_dir=str(tmp_path))) as client:
        for method, path in PROFILES:
            answer = await client.request(method, path)
            assert answer.status_code == 200, answer.text
            check_answer(default_document(), method, path, answer)


IN_ORDER = [
    ("POST", "/v1/files"),
    *(("GET", f"/v1/files{path}") for path in ("", "/{file_id}", "/{file_id}/content")),
    ("POST", "/v1/batches"),
    *(("GET", f"/v1/batches{path}") for path in ("", "/{batch_id}")),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("DELETE", "/v1/files/{file_id}"),
]
"""Of which each needs what came before."""


async def test_files_and_batches_are_as_declared(scripted: ScriptedEngine, tmp_path: Path) -> None:
    scripted.script.held = True
    app = make_app(scripted, batch_dir=str(tmp_path))
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x"}}
    names: dict[str, str] = {}
    document = default_document()
    async with client_of(app) as client:
        for method, path in IN_ORDER:
            asked: dict[str, Any] = {}
            if (method, path) == ("POST", "/v1/files"):
                asked = {"files": {"file": json.dumps(line)}, "data": {"purpose": "batch"}}
            elif (method, path) == ("POST", "/v1/batches"):
                body = {"endpoint": COMPLETIONS, "completion_window": "24h"}
                asked = {"json": {**body, "input_file_id": names["file"], "metadata": {"a": "b"}}}
            place = path.format(file_id=names.get("file"), batch_id=names.get("batch"))
            if method == "DELETE":
                await app.state.batches.stop()
                for batch in (await app.state.batches.storage()).batches.values():
                    batch.become(Status.CANCELLED, 0)
            answer = await client.request(method, place, **asked)
            assert answer.status_code == 200, answer.text
            check_answer(document, method, path, answer)
            if method == "POST":
                names.setdefault(answer.json()["object"], answer.json()["id"])


async def test_errors_are_as_declared(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    document = default_document()
    for path in (
        *(CHAT, COMPLETIONS, GENERATE, MESSAGES, "/v1/tokenize", "/v1/detokenize"),
        *("/api/chat", "/api/generate", "/api/show"),
        *("/completion", "/infill", "/apply-template"),
    ):
        wrong = [await client.post(path, json={}), await client.post(path, content=b"x")]
        wrong.append(
            await client.post(
                path, content=b" " * 2**23, headers={"Content-Type": "application/json"}
            )
        )
        assert [response.status_code for response in wrong] == [400, 415, 413]
        for response in wrong:
            check_answer(document, "POST", path, response)
    missing = await client.post(COMPLETIONS, json={"prompt": "x", "model": "other"})
    check_answer(document, "POST", COMPLETIONS, missing)
    check_answer(document, "GET", "/v1/models/{model_id}", await client.get("/v1/models/other"))
    scripted.script.fail_after = 0
    broken = await client.post(COMPLETIONS, json={"prompt": "x"})
    scripted.script.room = 0
    full = await client.post(COMPLETIONS, json={"prompt": "x"})
    scripted.state = EngineState.STARTING
    assert [missing.status_code, broken.status_code, full.status_code] == [404, 500, 503]
    for response in (broken, full):
        check_answer(document, "POST", COMPLETIONS, response)
    for path in ("/health", "/ready", "/health_generate"):
        check_answer(document, "GET", path, await client.get(path))


async def test_a_member_that_is_not_declared_would_be_found(client: httpx.AsyncClient) -> None:
    document = default_document()
    answer = (await client.post(COMPLETIONS, json={"prompt": "x"})).json()
    schema = document["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"][
        "application/json"
    ]["schema"]
    validate(document, schema, answer)
    for wrong in (
        {**answer, "more": 1},
        {**answer, "id": 5},
        {name: value for name, value in answer.items() if name != "usage"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(document, schema, wrong)


def references(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [found for value in part.values() for found in references(value)]
    return (
        [found for value in part for found in references(value)] if isinstance(part, list) else []
    )


async def test_nothing_is_declared_that_is_never_answered_or_is_not_there(
    client: httpx.AsyncClient,
) -> None:
    document = await document_of(client)
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == names
    statuses = {
        status
        for operations in document["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    assert statuses == {"200", "400", "404", "413", "415", "500", "501", "503", "529", "default"}


async def test_allow_has_the_methods_that_are_declared(client: httpx.AsyncClient) -> None:
    declared = default_document()["paths"]
    for path, operations in declared.items():
        methods = {method.upper() for method in operations}
        # These may be a response's id too.
        if path in (f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"):
            methods |= {method.upper() for method in declared[RESPONSES + "/{response_id}"]}
        answer = await client.request("TRACE", path)
        assert answer.status_code == 405
        assert {*answer.headers["allow"].split(", ")} - {"HEAD"} == methods, path


def bodies() -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Return (method, path, a body that is taken, the members that are declared of it)."""
    document = default_document()
    found = []
    for method, path, body in GOOD:
        if isinstance(body, dict):
            content = document["paths"][path][method.lower()]["requestBody"]["content"]
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found.append((method, path, body, document["components"]["schemas"][name]))
    return found


async def test_null_is_declared_and_taken_of_members_that_may_be_left_out(
    client: httpx.AsyncClient,
) -> None:
    for method, path, body, schema in bodies():
        left_out = {*schema["properties"]} - {*schema.get("required", ()), *body}
        asked = {**dict.fromkeys(left_out), **body}
        check_request(default_document(), method, path, asked)
        answer = await client.request(method, path, json=asked)
        assert answer.status_code == 200, (path, answer.text)


def test_schemas_have_the_words_of_json_schema_alone() -> None:
    parts = [SPECIFICATIONS[uri].contents for uri in SPECIFICATIONS if "2020-12" in uri]
    words = {word for part in parts for word in part["properties"]} | {"discriminator"}

    def check(schema: Any) -> None:
        assert not isinstance(schema, dict) or schema.keys() <= words, schema
        if not isinstance(schema, dict):
            return
        for name, value in schema.items():
            if name in ("properties", "$defs"):
                each = [*value.values()]
            else:
                each = value if name in ("anyOf", "oneOf", "allOf") else [value]
            if name in ("properties", "$defs", "anyOf", "oneOf", "allOf", "items"):
                for part in each:
                    check(part)

    for schema in default_document()["components"]["schemas"].values():
        check(schema)


WRONG_ITEMS: list[Any] = [None, 5, "x", [], [None], {}, {"type": None}, {"type": []}]


@pytest.mark.slow
async def test_an_item_of_a_list_may_be_any_json(client: httpx.AsyncClient) -> None:
    """Whatever stands in a list of objects is refused, and nothing ends in an error of ours."""
    for method, path, body, schema in bodies():
        for name, member in schema["properties"].items():
            if "array" in json.dumps(member):
                for item in WRONG_ITEMS:
                    asked = {**body, name: [item]}
                    answer = await client.request(method, path, json=asked)
                    assert answer.status_code < 500, (path, name, item, answer.text)
    inner = {"type": "namespace", "name": "n"}
    for item in WRONG_ITEMS:
        asked = {"model": MODEL, "input": "x", "tools": [{**inner, "tools": [item]}]}
        assert (await client.post(RESPONSES, json=asked)).status_code < 500, item


async def test_a_key_is_declared_where_one_is_needed(scripted: ScriptedEngine) -> None:
    async with client_of(
        make_app(scripted, api_key="k"), headers={"Authorization": "Bearer k"}
    ) as client:
        document = await document_of(client)
        assert document["components"]["securitySchemes"] == {
            "key": {"type": "http", "scheme": "bearer"}
        }
        assert document["paths"][CHAT]["post"]["security"] == [{"key": []}]
        assert "security" not in document["paths"]["/health"]["get"]
        refused = await client.post(
            CHAT, json={"messages": [USER]}, headers={"Authorization": "Bearer x"}
        )
        check_answer(document, "POST", CHAT, refused)


class Page(HTMLParser):
    """What a page names: the tags, where its links lead, its anchors, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("href", "src", "action", "data", "poster", "srcset"):
                self.links.add(value or "")
            if name == "id":
                self.anchors.add(f"#{value}")

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_shows_every_endpoint_and_needs_nothing_from_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    document = await document_of(client)
    answer = await client.get("/docs")
    page = Page(answer.text)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    assert page.links - page.anchors == {"openapi.json"}
    assert "url(" not in answer.text and "@import" not in answer.text
    assert (await client.get("/openapi.json")).status_code == 200
    for path, operations in document["paths"].items():
        assert all(f"{method.upper()} {path}" in page.text for method in operations)
    for name, schema in document["components"]["schemas"].items():
        assert f"#{name}" in page.anchors
        assert all(member in page.text for member in schema.get("properties", ()))
    assert (await client.get("/redoc")).status_code == 404


def test_what_a_document_says_cannot_become_html() -> None:
    evil = "<script>alert('x')</script>\"'"
    schemas = {
        evil: {
            "description": evil,
            "properties": {
                evil: {"type": evil, "default": evil, "description": evil, "enum": [evil]}
            },
        }
    }
    responses = {
        evil: {
            "description": evil,
            "content": {evil: {"schema": {"$ref": f"#/components/schemas/{evil}"}}},
        }
    }
    operation = {"summary": evil, "description": evil, "responses": responses}
    page = Page(
        render(
            {
                "info": {"title": evil, "version": evil, "description": evil},
                "paths": {evil: {"get": operation}},
                "components": {"schemas": schemas},
            }
        )
    )
    assert "script" not in page.tags
    assert page.links == {f"#{evil}", "openapi.json"} and page.anchors == {f"#{evil}"}
