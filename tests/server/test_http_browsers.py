"""What browsers and probes ask beside requests: CORS, HEAD."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_fixtures import client_of, error_of, make_app, serve
from scripted_engine import ScriptedEngine

from piecework.cli.core.flags import ServerConfig
from piecework.runtime.config.engine import EngineConfig

ORIGIN, OTHER = "https://chat.example", "https://evil.example"
KEY = "secret"
COMPLETIONS = "/v1/completions"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def ask(
    app: Any, method: str, path: str, origin: str = ORIGIN, **request: Any
) -> httpx.Response:
    headers = {"Origin": origin, **request.pop("headers", {})}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test"
    ) as client:
        return await client.request(method, path, headers=headers, **request)


async def test_a_preflight_passes_without_the_key_that_the_request_itself_needs(
    scripted: ScriptedEngine,
) -> None:
    app = make_app(scripted, api_key=KEY, cors_origins=ORIGIN)
    asked = await ask(app, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert (asked.status_code, allowed(asked)) == (200, ORIGIN)
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert (await ask(app, "POST", COMPLETIONS, json={"prompt": "x"})).status_code == 401
    answer = await ask(
        app, "POST", COMPLETIONS, json={"prompt": "x"}, headers={"Authorization": f"Bearer {KEY}"}
    )
    assert (answer.status_code, allowed(answer)) == (200, ORIGIN)


async def test_other_origins_and_servers_without_the_flag_allow_nothing(
    scripted: ScriptedEngine,
) -> None:
    app = make_app(scripted, cors_origins=f"{ORIGIN}, http://localhost:5173")
    assert allowed(await ask(app, "GET", "/v1/models", OTHER)) is None
    refused = await ask(app, "OPTIONS", COMPLETIONS, OTHER, headers=PREFLIGHT)
    assert error_of(refused, 403, "Origin")["code"] == "origin_not_allowed"
    assert allowed(refused) is None
    assert (
        allowed(await ask(app, "GET", "/v1/models", "http://localhost:5173"))
        == "http://localhost:5173"
    )
    plain = make_app(scripted)
    assert allowed(await ask(plain, "GET", "/v1/models")) is None
    assert (await ask(plain, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)).status_code == 405


@pytest.mark.parametrize("origins", [ORIGIN, "*"])
async def test_an_allowed_page_may_reach_a_server_on_its_readers_network(
    scripted: ScriptedEngine, origins: str
) -> None:
    private = "Access-Control-Request-Private-Network"
    app = make_app(scripted, cors_origins=origins)
    asked = await ask(app, "OPTIONS", COMPLETIONS, headers={**PREFLIGHT, private: "true"})
    assert (asked.status_code, allowed(asked)) == (200, origins)
    assert asked.headers["access-control-allow-private-network"] == "true"
    other = await ask(
        make_app(scripted, cors_origins=ORIGIN),
        "OPTIONS",
        COMPLETIONS,
        OTHER,
        headers={**PREFLIGHT, private: "true"},
    )
    error_of(other, 403, "Origin")


async def test_a_preflight_for_another_method_names_the_methods(scripted: ScriptedEngine) -> None:
    asked = {**PREFLIGHT, "Access-Control-Request-Method": "PATCH"}
    answer = await ask(
        make_app(scripted, cors_origins=ORIGIN), "OPTIONS", COMPLETIONS, headers=asked
    )
    assert "DELETE" in error_of(answer, 405, "Access-Control-Request-Method")["message"]
    assert allowed(answer) == ORIGIN


async def test_a_star_allows_every_origin(scripted: ScriptedEngine) -> None:
    assert (
        allowed(await ask(make_app(scripted, cors_origins="*"), "GET", "/v1/models", OTHER)) == "*"
    )


async def test_errors_carry_the_headers_too(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("secret")

    app = make_app(scripted, cors_origins=ORIGIN)
    good = {"json": {"prompt": "x"}}
    cases: list[tuple[int, str, str, dict[str, Any]]] = [
        (400, "POST", COMPLETIONS, {"json": {}}),
        (404, "GET", "/nowhere", {}),
        (405, "GET", COMPLETIONS, {}),
        (
            413,
            "POST",
            COMPLETIONS,
            {"content": b" " * 2**23, "headers": {"Content-Type": "application/json"}},
        ),
        (415, "POST", COMPLETIONS, {"content": b"x"}),
    ]
    for status, method, path, request in cases:
        answer = await ask(app, method, path, **request)
        assert (answer.status_code, allowed(answer)) == (status, ORIGIN)
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed and "x-ratelimit-remaining-tokens" in exposed
    locked = await ask(
        make_app(scripted, cors_origins=ORIGIN, api_key=KEY), "POST", COMPLETIONS, **good
    )
    assert (locked.status_code, allowed(locked)) == (401, ORIGIN)
    scripted.script.room = 0
    full = await ask(app, "POST", COMPLETIONS, **good)
    assert (full.status_code, allowed(full)) == (503, ORIGIN)
    scripted.script.room = 9
    monkeypatch.setattr(scripted, "add_request", broken)
    unforeseen = await ask(app, "POST", COMPLETIONS, **good)
    assert (unforeseen.status_code, allowed(unforeseen)) == (500, ORIGIN)
    assert "secret" not in unforeseen.text and unforeseen.headers["x-request-id"]


async def test_streams_carry_the_headers_too(scripted: ScriptedEngine) -> None:
    answer = await ask(
        make_app(scripted, cors_origins=ORIGIN),
        "POST",
        COMPLETIONS,
        json={"prompt": "x", "stream": True},
    )
    assert allowed(answer) == ORIGIN
    assert answer.text.endswith("data: [DONE]\n\n")


def _says(site: str | None, origin: str | None, **more: str) -> dict[str, str]:
    found = {"Sec-Fetch-Site": site, "Origin": origin, **more}
    return {name: value for name, value in found.items() if value is not None}


FOREIGN = [
    _says("cross-site", OTHER),
    _says("same-site", "http://test:5173"),
    _says(None, OTHER),
    _says(None, "null"),
    _says("cross-site", None),
    _says("cross-site", "null"),
    _says(None, "http://test.evil.example"),
    _says(None, "http://test", Host="test:8000"),
    _says(None, "https://test", Host="test:80"),
]
OWN = [
    _says(None, None),
    _says("none", None),
    _says("same-origin", "http://test"),
    _says(None, "http://test"),
    _says(None, "https://chat.lan", **{"X-Forwarded-Host": "chat.lan"}),
    _says(None, "https://chat.lan", **{"X-Forwarded-Host": "chat.lan, inner.lan"}),
    _says(None, "http://chat.lan", Host="chat.lan:80"),
    _says(None, "https://chat.lan", **{"X-Forwarded-Host": "chat.lan:443"}),
    _says("cross-site", "vscode-webview://1abc"),
    _says("cross-site", ORIGIN),
]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/flush_cache"),
        ("GET", "/flush_cache"),
        ("HEAD", "/flush_cache"),
        ("POST", "/abort_request"),
        ("POST", "/start_profile"),
        ("POST", "/stop_profile"),
        ("POST", "/v1/batches/b/cancel"),
        ("DELETE", "/v1/files/f"),
        ("POST", COMPLETIONS),
    ],
)
async def test_pages_of_other_origins_change_nothing(
    scripted: ScriptedEngine, method: str, path: str
) -> None:
    app = make_app(scripted, cors_origins=ORIGIN)
    async with client_of(app) as client:
        for headers in FOREIGN:
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 403, headers
        for headers in OWN:
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code != 403, headers
    if method == "POST":
        async with client_of(make_app(scripted)) as client:
            answer = await client.post(path, headers=_says("cross-site", ORIGIN))
            assert error_of(answer, 403, "Origin")["code"] == "origin_not_allowed"


async def test_what_only_reads_is_not_asked_where_it_comes_from(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted)) as client:
        for headers in FOREIGN:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    ["chat.example", "https://a.example/path", "https://*.example", "https://a.example,,x", "null"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"--cors-origins: .* is not an origin"):
        ServerConfig(cors_origins=wrong, engine=EngineConfig())


READABLE = [
    "/health",
    "/live",
    "/ready",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/toy",
    "/model_info",
    "/server_info",
    "/openapi.json",
    "/docs",
]


@pytest.mark.parametrize("path", READABLE)
def test_head_has_the_headers_of_get_and_no_body(url: str, path: str) -> None:
    # A busy machine takes its time to describe all endpoints.
    with httpx.Client(base_url=url, timeout=60) as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert whole.content
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path not in ("/metrics", "/server_info"):  # these say something else each time
            assert head.headers["content-length"] == whole.headers["content-length"]
        assert client.get("/version").status_code == 200  # the connection is in order


def test_head_of_what_cannot_be_got_is_the_same_error_without_a_body(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        assert [client.head(path).status_code for path in ("/nowhere", COMPLETIONS)] == [404, 405]
        assert client.head(COMPLETIONS).headers["allow"] == "POST"
        assert client.post("/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/x", "GET, HEAD, DELETE"),
        ("/v1/responses/x", "GET, HEAD, DELETE"),
        ("/v1/responses", "POST"),
        ("/ping", "GET, HEAD, POST"),
        ("/flush_cache", "GET, HEAD, POST"),
    ],
)
async def test_allow_names_every_method_of_a_path(
    scripted: ScriptedEngine, path: str, methods: str
) -> None:
    async with client_of(make_app(scripted)) as client:
        answer = await client.request("PATCH", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_head_needs_the_key_as_get_does(scripted: ScriptedEngine) -> None:
    with serve(make_app(scripted, api_key=KEY)) as url:
        assert httpx.head(f"{url}/v1/models").status_code == 401
        assert httpx.head(f"{url}/health").status_code == 200


async def test_head_passes_through_the_application_in_process(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted)) as client:
        assert (await client.head("/health")).content == b""
