"""Several names of one model: `--served-model-name a b`."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_fixtures import client_of
from scripted_engine import ScriptedEngine
from test_keys import SECRET, entry, keys_file

from piecework.cli.core.flags import ServerConfig
from piecework.runtime.config.engine import EngineConfig
from piecework.server.app import create_app

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def config(names: str, **settings: str) -> ServerConfig:
    engine = EngineConfig(model_path="models/toy")
    return ServerConfig(served_model_name=names, engine=engine, batch_dir="none", **settings)


async def test_a_model_answers_to_all_its_names_and_is_listed_under_each(
    scripted: ScriptedEngine,
) -> None:
    async with client_of(create_app(scripted, config("first, org/second"))) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["first", "org/second"]
        for name in ("first", "org/second"):
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
            answer = await client.post("/v1/chat/completions", json={**BODY, "model": name})
            assert answer.json()["model"] == "first"
        refused = await client.post("/v1/chat/completions", json={**BODY, "model": "third"})
    assert refused.status_code == 404
    assert "has 'first' and 'org/second'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("models", "status"), [(["second"], 200), (["other"], 404)])
async def test_a_key_for_one_name_of_a_model_may_use_it(
    scripted: ScriptedEngine, tmp_path: Path, models: list[str], status: int
) -> None:
    keys = str(keys_file(tmp_path, entry(models=models)))
    app = create_app(scripted, config("first,second", api_keys=keys))
    async with client_of(app, headers={"Authorization": f"Bearer {SECRET}"}) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        answer = await client.post("/v1/chat/completions", json={**BODY, "model": "second"})
    assert (len(listed), answer.status_code) == (2 if status == 200 else 0, status)


@pytest.mark.parametrize("names", ["a,", ",a", "a,,b", ","])
def test_an_empty_name_is_refused(names: str) -> None:
    with pytest.raises(ValueError, match=r"--served-model-name .* has an empty name"):
        config(names)
