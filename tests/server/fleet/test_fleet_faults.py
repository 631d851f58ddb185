"""Several models in one server: what a client, a failure or a setting could spoil for others."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from batch_fixtures import create, ended, line, lines_of, upload
from fleet_fixtures import (
    GIB,
    LoadableEngine,
    ScriptedFleet,
    ask,
    contend,
    served,
    states,
    until,
)
from http_fixtures import error_of
from safetensors.numpy import save_file

from piecework.server.config.keys import hash_of
from piecework.server.engine.state import EngineState
from piecework.server.fleet import fleet as fleet_module
from piecework.server.fleet import member as member_module
from piecework.server.fleet.estimate import estimate, weight_bytes
from piecework.server.fleet.member import Member
from piecework.server.openai.batches import runner


async def test_what_names_a_model_by_millions_of_lists_makes_none(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a") as client:
        content = b'{"model": [' + b"[]," * 1_300_000 + b"[]]}"
        headers = {"Content-Type": "application/json"}
        tracemalloc.start()
        try:
            answer = await client.post("/v1/completions", content=content, headers=headers)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        error_of(answer, 400, "model")
        assert most < 8 * len(content)  # a list takes 56 bytes, beside its place


async def test_an_origin_that_the_server_allows_its_models_allow(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", cors_origins="https://chat.example") as client:
        for origin, status in (("https://chat.example", 200), ("https://evil.example", 403)):
            client.headers["Origin"] = origin
            assert (await ask(client, "a")).status_code == status


async def test_a_drain_waits_for_a_model_that_was_giving_way(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        engine, first, other = await contend(scripted, client)
        await scripted.fleet.drain(5)
        assert engine.state is EngineState.DRAINING
        engine.script.held = False
        assert (await first).status_code == 200 and (await other).status_code == 503


async def test_who_is_cancelled_when_let_in_leaves(scripted: ScriptedFleet) -> None:
    scripted.prepare = lambda engine: engine.may_start.clear()
    async with served(scripted, "a") as client:
        member, let_in = scripted.fleet.members["a"], asyncio.Event()
        enter = scripted.fleet._enter

        async def enter_and_tell(member: Member) -> int:
            place = await enter(member)
            let_in.set()
            return place

        scripted.fleet._enter = enter_and_tell  # type: ignore[method-assign]
        asked = asyncio.create_task(ask(client, "a"))
        await until(lambda: "a" in scripted.engines)
        scripted.engines["a"].may_start.set()
        await let_in.wait()
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled() and member.under_way == 0


@pytest.mark.parametrize(("seconds", "counts"), [(0.6, (1, 1)), (60.0, (2, 0))])
async def test_lines_of_a_model_that_keeps_failing_fail(
    scripted: ScriptedFleet,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    counts: tuple[int, int],
) -> None:
    """And those of one that could be loaded at last are answered."""
    monkeypatch.setattr(runner, "_FAILING_SECONDS", seconds)
    monkeypatch.setattr(runner, "_TRY_AGAIN", 0.2)
    monkeypatch.setattr(member_module, "RETRY_SECONDS", 0.1)

    def prepare(engine: LoadableEngine) -> None:
        engine.fault = "no such weights" if engine.name == "b" else None

    scripted.prepare = prepare
    async with served(scripted, "a", "b") as client:
        lines = [line(name, model=name, prompt=[5, 6]) for name in "ab"]
        batch = await create(client, await upload(client, lines))
        if seconds > 1:
            await until(lambda: "b" in scripted.engines and scripted.engines["b"].starts > 1)
            scripted.engines["b"].fault = None
        told = await ended(client, batch["id"])
        assert (told["request_counts"]["completed"], told["request_counts"]["failed"]) == counts
        if counts[1]:
            (failed,) = await lines_of(client, told["error_file_id"])
            error = failed["response"]["body"]["error"]
            assert error["code"] == "model_failed" and "no such weights" in error["message"]


async def test_models_that_are_preloaded_are_not_bounded_by_the_queue(
    scripted: ScriptedFleet,
) -> None:
    own = {name: {"preload": True} for name in "abc"}
    async with served(scripted, "a", "b", "c", max_queued_requests=0, **own) as client:
        assert set((await states(client)).values()) == {"ready"}


async def test_a_model_that_fails_lets_nobody_in_while_it_ends(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        await ask(client, "a")
        engine, may_stop, stop = scripted.engines["a"], asyncio.Event(), scripted.engines["a"].stop

        async def stop_slowly(*, at_once: bool = False) -> None:
            await may_stop.wait()
            await stop(at_once=at_once)

        engine.stop = stop_slowly  # type: ignore[method-assign]
        engine.break_down("one of its engines is gone")
        await asyncio.sleep(0.01)
        late, other = asyncio.create_task(ask(client, "a")), asyncio.create_task(ask(client, "b"))
        await asyncio.sleep(0.1)
        assert not late.done() and not other.done()
        may_stop.set()
        assert error_of(await late, 503)["code"] == "model_failed"
        assert (await other).status_code == 200
        assert engine.stops == 1 and await states(client) == {"a": "failed", "b": "ready"}


async def test_models_are_switched_while_nobody_can_look_at_their_memory(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = threading.Event()

    def stuck(pids: object) -> int:
        assert may_look.wait(10)
        return GIB

    monkeypatch.setattr(fleet_module, "resident_memory", stuck)
    monkeypatch.setattr(fleet_module, "_CHECK_SECONDS", 0.01)
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        try:
            for name in "abab":
                await asyncio.sleep(0.02)
                answer = await asyncio.wait_for(ask(client, name), 5)
                assert answer.status_code == 200
        finally:
            may_look.set()


async def test_an_engine_that_cannot_be_stopped_keeps_nobody_waiting(
    scripted: ScriptedFleet,
) -> None:
    async def broken(*, at_once: bool = False) -> None:
        raise OSError("no such socket")

    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        await ask(client, "a")
        scripted.engines["a"].stop = broken  # type: ignore[method-assign]
        assert (await asyncio.wait_for(ask(client, "b"), 5)).status_code == 200
        assert await states(client) == {"a": "unloaded", "b": "ready"}


async def test_a_key_is_told_of_its_own_models_alone(
    scripted: ScriptedFleet, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.jsonl"
    line = {"name": "k", "sha256": hash_of(b"k"), "models": ["a", "gone"], "admin": True}
    keys.write_text(json.dumps(line))
    async with served(scripted, "a", "hidden", api_keys=str(keys)) as client:
        client.headers["Authorization"] = "Bearer k"
        for answer in (
            await ask(client, "gone"),
            await client.get("/v1/models/gone"),
            await client.get("/v1/status?model=gone"),
            await client.post("/v1/models/load", json={"model": "hidden"}),
        ):
            told = error_of(answer, 404, "model")["message"].replace("'hidden' does not exist", "")
            assert "hidden" not in told
        assert not scripted.engines


@pytest.mark.parametrize("count", [1, 2])
def test_each_replica_of_a_model_counts_before_it_is_loaded(
    scripted: ScriptedFleet, tmp_path: Path, count: int
) -> None:
    save_file({"a": np.zeros(2**20, np.float16)}, tmp_path / "model.safetensors")
    (one,) = scripted.config("a").members
    several = replace(one, server=replace(one.server, dp_size=count))
    assert weight_bytes(several) == count * weight_bytes(one) >= count * 2**21
    cache = int(0.2 * GIB)
    assert estimate(several, GIB) - cache == count * (estimate(one, GIB) - cache)
