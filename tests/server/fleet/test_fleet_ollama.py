"""Ollama's API of several models: lists load no model, and waiting streams stay open."""

from __future__ import annotations

import asyncio
import json

import pytest
from fleet_fixtures import ScriptedFleet, served, until, until_state

from piecework.server.fleet.member import MemberState
from piecework.server.ollama.keep_alive import NEVER, seconds_of

CHAT = {"model": "b:latest", "messages": [{"role": "user", "content": "Hi"}]}


async def test_lists_load_no_model(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b") as client:
        tags = (await client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["a:latest", "b:latest"]
        for each in tags:
            shown = await client.post("/api/show", json={"model": each["name"]})
            assert shown.status_code == 200 and shown.json()["capabilities"]
        assert (await client.post("/api/show", json={"model": "c"})).status_code == 404
        assert not scripted.engines and (await client.get("/api/ps")).json()["models"] == []
        answer = await client.post("/api/chat", json={**CHAT, "stream": False})
        assert answer.json()["model"] == "b:latest" and list(scripted.engines) == ["b"]
        (running,) = (await client.get("/api/ps")).json()["models"]
        assert running["name"] == "b:latest" and running["context_length"]
        shown = (await client.post("/api/show", json={"model": "b"})).json()
        assert shown["template"] and "tools" in shown["capabilities"]
        assert (await client.post("/api/pull", json={})).status_code == 501
        assert (await client.post("/api/chat", json={**CHAT, "model": "c"})).status_code == 404


@pytest.mark.parametrize(
    ("options", "last"), [({"num_predict": 2}, "done"), ({"temperature": -1}, "error")]
)
async def test_a_stream_that_waits_for_its_model_sends_blanks(
    scripted: ScriptedFleet, options: dict[str, int], last: str
) -> None:
    scripted.prepare = lambda engine: engine.may_start.clear()
    async with served(scripted, "a", "b", sse_ping_interval=0.03) as client:
        asked = asyncio.create_task(client.post("/api/chat", json={**CHAT, "options": options}))
        await until(lambda: "b" in scripted.engines)
        await asyncio.sleep(0.15)
        scripted.engines["b"].may_start.set()
        answer = await asked
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.startswith("  ") and answer.text.endswith("\n")
    assert last in json.loads(answer.text.splitlines()[-1])


async def test_keep_alive_of_the_last_request_unloads_a_model_or_keeps_it(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b", "c", idle_unload=0.05) as client:
        for model, keep_alive in (("a", -1), ("b", "1h"), ("c", "5s")):
            body = {**CHAT, "model": model, "stream": False, "keep_alive": keep_alive}
            assert (await client.post("/api/chat", json=body)).status_code == 200
        body = {**CHAT, "model": "c", "stream": False, "keep_alive": 0}
        assert (await client.post("/api/chat", json=body)).status_code == 200
        await until_state(scripted, "c", MemberState.UNLOADED)
        names = {each["name"] for each in (await client.get("/api/ps")).json()["models"]}
        assert names == {"a:latest", "b:latest"}
        # Without the parameter, the server's own time holds again, and the model sleeps.
        body = {**CHAT, "model": "a", "stream": False}
        assert (await client.post("/api/chat", json=body)).status_code == 200
        await until_state(scripted, "a", MemberState.SLEEPING)
        assert not scripted.engines["b"].controls and not scripted.engines["b"].stops
        names = {each["name"] for each in (await client.get("/api/ps")).json()["models"]}
        assert names == {"b:latest"}
        # No time is too long for a date.
        body = {**CHAT, "model": "b", "stream": False, "keep_alive": 1e300}
        assert (await client.post("/api/chat", json=body)).status_code == 200
        assert (await client.get("/api/ps")).json()["models"][0]["expires_at"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"null", None), (b"300", 300.0), (b'"5m"', 300.0), (b'"1h30m"', 5400.0), (b"0", 0.001),
        (b'"0"', 0.001), (b"-1", NEVER), (b'"-1"', NEVER), (b'"-1m"', NEVER), (b'"soon"', None),
        (b"true", None), (b"[]", None), (b"1e999", None), (b'"1.5h"', 5400.0), (b'"\\ud800"', None),
        (b'"' + b"1h" * 500 + b'"', None), (b'""', None),
    ],
)  # fmt: skip
def test_durations_are_read_as_ollama_reads_them(value: bytes, seconds: float | None) -> None:
    assert seconds_of(value) == seconds
