"""Adapters (LoRA) of a fleet's models: a request that names one goes to its model."""

from __future__ import annotations

from fleet_fixtures import LoadableEngine, ScriptedFleet, ask, served
from http_fixtures import error_of

from piecework.runtime.core.adapter_info import AdapterInfo


async def test_an_adapter_is_found_at_its_model_which_is_loaded_for_it(
    scripted: ScriptedFleet,
) -> None:
    def prepare(engine: LoadableEngine) -> None:
        if engine.name == "b":
            info = {"path": "/x", "rank": 4, "num_layers": 3, "num_bytes": 9}
            engine.adapters = {"sql": AdapterInfo(identity="0f", name="sql", **info)}

    scripted.prepare = prepare
    async with served(scripted, "a", "b", b={"adapters": "sql=/x"}) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("a", None), ("b", None), ("sql", "b")
        ]  # fmt: skip
        for name in ("sql", "b:sql"):
            answer = await ask(client, name)
            assert (answer.status_code, answer.json()["model"]) == (200, "sql")
            assert scripted.engines["b"].requests[-1].adapter == "0f"
        assert "a" not in scripted.engines
        for name in ("a:sql", "sql:b", "other"):
            error_of(await ask(client, name), 404, "model")
