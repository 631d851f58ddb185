"""`GET /` and its files: who gets them, with which headers, and `--no-page`; `GET /v1/status`."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tomllib
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine

from piecework.server.engine.state import EngineState
from piecework.server.page.files import page_files

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "server/page/static"
KEY = "secret"
VENDOR = ROOT / "server/page/vendor"
MODULES = sorted(STATIC.glob("*.js"))
MAX_LINES = 400
NAMED = re.compile(
    r"""(?:src=|href=|href: )["'](page/[^"']+)["']|(?:from |import\()'\./([^']+)'|url\(([^)"]+)\)"""
)


async def test_the_page_needs_no_key_and_what_it_asks_for_does(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, api_key=KEY)) as client:
        for path in ("/", "/page/app.js", "/page/base.css"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/status", "/v1/models", "/docs"):
            error_of(await client.get(path), 401)
        error_of(await client.get("/page/../v1/models"), 401)


async def test_no_script_but_the_server_s_own_may_run(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    rules = dict(
        rule.strip().partition(" ")[::2]
        for rule in page.headers["content-security-policy"].split(";")
    )
    assert (rules["default-src"], rules["script-src"]) == ("'none'", "'self'")
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page.text) == []
    module = await client.get("/page/app.js")
    assert module.headers["content-type"].startswith("text/javascript")
    assert module.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_the_browser_has_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/app.js")
    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
        again = await client.get("/page/app.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    changed = await client.get("/page/app.js", headers={"If-None-Match": '"other"'})
    assert (changed.status_code, changed.content) == (200, first.content)


@pytest.mark.parametrize(
    ("asked", "zipped"),
    [("gzip", True), ("br;q=1, gzip;q=0.5", True), ("gzip;q=0", False), ("", False), ("br", False)],
)
async def test_who_reads_gzip_gets_it(client: httpx.AsyncClient, asked: str, zipped: bool) -> None:
    request = client.build_request("GET", "/page/app.js", headers={"Accept-Encoding": asked})
    answer = await client.send(request, stream=True)
    content = b"".join([part async for part in answer.aiter_raw()])
    assert (answer.headers.get("content-encoding") == "gzip") is zipped
    assert (gzip.decompress(content) if zipped else content) == (STATIC / "app.js").read_bytes()


@pytest.mark.parametrize("name", ["none.js", "..%2ffiles.py", "%2e%2e/files.py", "a/b.js", "%00"])
async def test_nothing_else_is_a_file(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_no_page_leaves_nothing_at_the_root(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, no_page=True)) as client:
        for path in ("/", "/page/app.js"):
            error_of(await client.get(path), 404)
        assert (await client.get("/v1/status")).status_code == 200


def test_every_file_is_packaged_and_every_name_in_a_file_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["piecework.server.page"] == [
        "static/*",
        "vendor/*",
    ]
    named = {
        found[0].removeprefix("page/") or found[1] or found[2]
        for path in [*STATIC.iterdir(), VENDOR / "katex.min.css"]
        for found in NAMED.findall(path.read_text())
    }
    licences = {"katex-license.txt", "highlight-license.txt"}
    assert named | {"index.html"} | licences == set(page_files())
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 1_000_000


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_modules_are_short_and_make_no_html_of_text(module: Path) -> None:
    lines = module.read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > 100] == []
    code = "\n".join(lines)
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code) == []
    assert re.findall(r"\.style\s*=|'style'|['\"`]https?://(?!www\.w3\.org/)", code) == []


async def test_the_status_tells_of_requests_and_nothing_that_they_say(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    body = {"prompt": "hello hello", "max_tokens": 2}
    asked = asyncio.create_task(client.post("/v1/completions", json=body))
    while not scripted.requests:
        await asyncio.sleep(0.001)
    told = (await client.get("/v1/status")).json()
    (row,) = told["requests"]
    assert (row["phase"], row["completion_tokens"], row["cached_tokens"]) == ("queue", 0, None)
    assert row["prompt_tokens"] == len(scripted.requests[0].prompt_ids) and row["seconds"] < 60
    assert scripted.requests[0].rid not in str(told) and "hello" not in str(told)
    scripted.script.held = False
    await asked
    error_of(await client.post("/v1/completions", json={}), 400, "prompt")
    told = (await client.get("/v1/status")).json()
    assert (told["requests"], told["ended"]) == ([], 1)
    assert told["errors"] == {"invalid_request_error": 1}


async def test_a_key_that_is_not_everybody_s_sees_no_requests_of_others(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    keys = [{"name": name, "sha256": sha256(name.encode()).hexdigest()} for name in ("a", "boss")]
    (tmp_path / "keys").write_text("".join(f"{json.dumps(key)}\n" for key in keys[:1]))
    with (tmp_path / "keys").open("a") as file:
        file.write(json.dumps({**keys[1], "admin": True}))
    scripted.script.held = True
    async with client_of(make_app(scripted, api_keys=str(tmp_path / "keys"))) as client:
        boss, other = ({"Authorization": f"Bearer {name}"} for name in ("boss", "a"))
        asked = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "hi"}, headers=boss)
        )
        while not scripted.requests:
            await asyncio.sleep(0.001)
        told = [(await client.get("/v1/status", headers=who)).json() for who in (boss, other)]
        scripted.script.held = False
        await asked
    assert [len(one["requests"]) for one in told] == [1, 0]
    assert told[0]["info"] is not None and told[1]["info"] is None
    assert told[1]["kind"] == "text" and told[1]["unfinished"] == 1


async def test_the_status_of_an_engine_that_starts(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.state, scripted.info = EngineState.STARTING, None
    told = (await client.get("/v1/status")).json()
    assert (told["kind"], told["state"], told["info"]) == ("text", "starting", None)
