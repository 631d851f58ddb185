"""Idle models sleep: they wake for a request, give their memory to others, and may be ended."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fleet_fixtures import GIB, ScriptedFleet, ask, served, states, until_state

from piecework.runtime.core.control_messages import Sleep, WakeUp
from piecework.server.engine.state import EngineUnavailable
from piecework.server.fleet import fleet as fleet_module
from piecework.server.fleet import member as member_module
from piecework.server.fleet.member import Closing, MemberState


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch, scripted: ScriptedFleet) -> None:
    """A loaded model takes a GiB, a sleeping one a quarter."""

    def resident(_: list[int]) -> int:
        engines = scripted.engines.values()
        return GIB // 4 if any(each.asleep for each in engines) else GIB

    monkeypatch.setattr(member_module, "resident_memory", resident)
    monkeypatch.setattr(fleet_module, "resident_memory", resident)


async def asleep(scripted: ScriptedFleet, client: httpx.AsyncClient, name: str = "a") -> None:
    assert (await ask(client, name)).status_code == 200
    await until_state(scripted, name, MemberState.SLEEPING)


async def test_a_request_wakes_its_model_without_a_start(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        for _ in range(2):
            await asleep(scripted, client)
        engine = scripted.engines["a"]
        assert (engine.starts, engine.stops) == (1, 0)
        assert engine.controls == [Sleep(level=1), WakeUp(), Sleep(level=1)]
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["status"]["memory"] == GIB // 4 and card["status"]["memory_needed"] >= GIB
        metrics = (await client.get("/metrics")).text
        assert 'piecework:model_unloads_total{model_name="a",reason="idle"} 2.0' in metrics
        assert 'piecework:model_load_seconds_count{model_name="a"} 2.0' in metrics


async def test_an_engine_that_cannot_sleep_is_ended(scripted: ScriptedFleet) -> None:
    scripted.prepare = lambda engine: setattr(engine, "control_error", "it has 2 ranks")
    async with served(scripted, "a", idle_unload=0.05) as client:
        await ask(client, "a")
        await until_state(scripted, "a", MemberState.UNLOADED)
        assert scripted.engines["a"].stops == 1
        assert (await ask(client, "a")).status_code == 200


async def test_a_sleeping_model_gives_its_memory_to_others(scripted: ScriptedFleet) -> None:
    settings = {"b": {"idle_unload": 0.0}, "c": {"idle_unload": 0.0}}
    async with served(
        scripted, "a", "b", "c", idle_unload=0.05, fleet_memory=2.25, **settings
    ) as client:
        await asleep(scripted, client)
        await ask(client, "b")
        # Both fit beside the sleeping one.
        await ask(client, "c")
        assert await states(client) == {"a": "sleeping", "b": "ready", "c": "ready"}
        # It needs the memory of another model to wake.
        assert (await ask(client, "a")).status_code == 200
        assert scripted.engines["a"].starts == 1 and scripted.engines["b"].stops == 1


async def test_a_model_does_not_need_the_memory_of_its_own_sleep(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", idle_unload=0.05, fleet_memory=1.1) as client:
        await asleep(scripted, client)
        assert (await ask(client, "a")).status_code == 200
        assert (scripted.engines["a"].starts, scripted.engines["a"].stops) == (1, 0)


async def test_a_request_for_a_sleeping_model_that_is_to_be_ended_waits_for_one_start(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has replaced a crashed one, so it is awake and has its memory again."""
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        member, engine = scripted.fleet.members["a"], scripted.engines["a"]
        check, replaced = scripted.fleet._check_memory, asyncio.Event()

        async def no_check() -> None:
            replaced.set()

        # The fleet's own check would end the model before the request comes.
        monkeypatch.setattr(scripted.fleet, "_check_memory", no_check)
        await replaced.wait()
        engine.asleep = False
        await check()
        assert member.closing is Closing.MEMORY
        assert (await ask(client, "a")).status_code == 200
        assert (engine.starts, engine.stops) == (2, 1)


async def test_a_model_whose_sleep_fails_half_way_is_ended(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await ask(client, "a")
        with monkeypatch.context() as patch:

            def fails(_: list[int]) -> int:
                raise OSError("no such process")

            patch.setattr(member_module, "resident_memory", fails)
            await until_state(scripted, "a", MemberState.UNLOADED)
        assert (await ask(client, "a")).status_code == 200


async def test_a_model_that_does_not_fit_beside_a_sleeping_one_ends_it(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b", idle_unload=0.05, fleet_memory=1.1) as client:
        await asleep(scripted, client)
        assert (await ask(client, "b")).status_code == 200
        assert scripted.engines["a"].stops == 1
        assert scripted.fleet.members["a"].state is MemberState.UNLOADED
        assert (await ask(client, "a")).status_code == 200


async def test_loaded_models_are_limited_and_sleeping_ones_do_not_count(
    scripted: ScriptedFleet,
) -> None:
    own = {"b": {"idle_unload": 0.0}}
    async with served(scripted, "a", "b", idle_unload=0.05, max_loaded_models=1, **own) as client:
        await asleep(scripted, client)
        await ask(client, "b")
        assert await states(client) == {"a": "sleeping", "b": "ready"}
        await ask(client, "a")
        assert (await states(client))["b"] == "unloaded"


async def test_a_process_that_replaces_a_sleeping_one_is_ended(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        scripted.engines["a"].asleep = False  # As after a crash.
        await until_state(scripted, "a", MemberState.UNLOADED)
        assert scripted.engines["a"].stops == 1
        assert (await ask(client, "a")).status_code == 200


async def test_a_crash_while_it_wakes_starts_it_anew(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        engine = scripted.engines["a"]

        async def crashes(message: object) -> None:
            raise EngineUnavailable("the engine process ended")

        monkeypatch.setattr(engine, "control", crashes)
        assert (await ask(client, "a")).status_code == 200
        assert (engine.starts, engine.stops) == (2, 1)


async def test_a_model_that_does_not_wake_is_refused_and_then_started_anew(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        engine = scripted.engines["a"]
        monkeypatch.setattr(member_module, "_CHANGE_SECONDS", 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "control", lambda message: asyncio.Event().wait())
            refused = await asyncio.wait_for(ask(client, "a"), 5)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        error = refused.json()["error"]
        assert error["code"] == "model_failed" and "did not wake within 0 s" in error["message"]
        assert (await states(client))["a"] == "failed" and engine.stops == 1
        scripted.fleet.members["a"].retry_at = 0.0
        assert (await ask(client, "a")).status_code == 200
        assert engine.starts == 2


async def test_a_model_that_does_not_fall_asleep_is_ended(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_CHANGE_SECONDS", 0.1)
    async with served(scripted, "a", idle_unload=0.05) as client:
        await ask(client, "a")
        monkeypatch.setattr(scripted.engines["a"], "control", lambda _: asyncio.Event().wait())
        await until_state(scripted, "a", MemberState.UNLOADED)
        assert scripted.engines["a"].stops == 1


async def test_one_that_is_given_up_asleep_fails(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        scripted.engines["a"].break_down("it crashed too often")
        await until_state(scripted, "a", MemberState.FAILED)
        scripted.fleet.members["a"].retry_at = 0.0
        assert (await ask(client, "a")).status_code == 200


async def test_a_sleeping_model_is_unloaded_on_demand_and_for_a_keep_alive_of_0(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", idle_unload=0.05) as client:
        await asleep(scripted, client)
        gone = await client.post("/v1/models/unload", json={"model": "a"})
        assert gone.json()["status"]["value"] == "unloaded"
        assert scripted.engines["a"].stops == 1
        chat = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
        await client.post("/api/chat", json={**chat, "keep_alive": 0})
        await until_state(scripted, "a", MemberState.UNLOADED)
        assert scripted.engines["a"].stops == 2
