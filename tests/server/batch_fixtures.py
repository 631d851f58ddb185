"""What tests of files and batches share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from http_fixtures import client_of, make_app
from scripted_engine import ScriptedEngine

COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@contextlib.asynccontextmanager
async def served(
    engine: ScriptedEngine, folder: Path, **settings: Any
) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """An application whose batches lie in a folder, from its start to its end."""
    app = make_app(engine, batch_dir=str(folder), **settings)
    headers = {"Authorization": "Bearer k"} if {"api_key", "api_keys"} & settings.keys() else {}
    await app.state.batches.start()
    try:
        async with client_of(app, headers=headers) as client:
            yield app, client
    finally:
        await app.state.batches.stop()


def line(custom_id: str, **members: Any) -> dict[str, Any]:
    body = {"prompt": custom_id, "max_tokens": 2, **members}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


async def upload(client: httpx.AsyncClient, lines: list[Any] | bytes) -> str:
    content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    answer = await client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
    )
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


async def create(client: httpx.AsyncClient, file_id: str, **members: Any) -> dict[str, Any]:
    body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=body | members)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    """The batch, once it has ended."""
    end = time.monotonic() + 20
    while True:
        found: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
        if found["status"] in ENDED:
            return found
        assert time.monotonic() < end, found
        await asyncio.sleep(0.01)


async def lines_of(client: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    """What a file of answers holds, by custom ids."""
    content = (await client.get(f"/v1/files/{file_id}/content")).text
    return sorted(map(json.loads, content.splitlines()), key=lambda each: each["custom_id"])
