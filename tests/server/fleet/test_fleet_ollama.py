"""Ollama's API of several models: lists load no model, and waiting streams stay open."""

from __future__ import annotations

import asyncio
import json

import pytest
from fleet_fixtures import ScriptedFleet, served, until

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
