"""Keys of `--api-keys` before several models: each sees, loads and asks its own alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from fleet_fixtures import ScriptedFleet
from http_fixtures import client_of, error_of

from piecework.server.config.keys import hash_of

BODY = {"prompt": [5, 6, 7], "max_tokens": 3}


async def test_a_key_reaches_its_own_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.jsonl"
    line = {"name": "k", "sha256": hash_of(b"k"), "models": ["b"], "tokens_per_minute": 1000}
    keys.write_text(json.dumps(line))
    service = ScriptedFleet(tmp_path, monkeypatch).service("a", "b", api_keys=str(keys))
    await service.engine.start()
    await service.engine.wait_ready()
    # What a key may use fills up again with time, of which a busy machine takes much.
    service.app.state.accounts.now = partial(float, service.app.state.accounts.now())
    try:
        async with client_of(service.app) as client:
            error_of(await client.post("/v1/completions", json=BODY), 401)
            client.headers["Authorization"] = "Bearer k"
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["b"]
            error_of(await client.get("/v1/models/a"), 404, "model")
            error_of(await client.post("/v1/models/load", json={"model": "b"}), 403)
            refused = await client.post("/v1/completions", json={**BODY, "model": "a"})
            error_of(refused, 404, "model")
            for named in ({"model": "b"}, {"model": "default"}, {}):
                answer = await client.post("/v1/completions", json={**BODY, **named})
                assert answer.json()["model"] == "b", answer.text
            used = 3 * answer.json()["usage"]["total_tokens"]
            left = (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"]
            assert int(left) == 1000 - used
    finally:
        await service.engine.stop()
