"""Several models in one server: who is loaded, who waits, who gives way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from fleet_fixtures import (
    BODY,
    GIB,
    LoadableEngine,
    ScriptedFleet,
    ask,
    contend,
    served,
    states,
    until,
    until_state,
)
from http_fixtures import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from piecework.server.config.keys import hash_of
from piecework.server.fleet import fleet as fleet_module
from piecework.server.fleet.estimate import check_room
from piecework.server.fleet.fleet import Fleet
from piecework.server.fleet.member import Member, MemberState


async def test_the_model_field_chooses_and_loads(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b") as client:
        assert await states(client) == {"a": "unloaded", "b": "unloaded"}
        answer = await ask(client, "b")
        assert (answer.status_code, answer.json()["model"]) == (200, "b")
        assert answer.headers["x-queue-place"] == "1"
        assert await states(client) == {"a": "unloaded", "b": "ready"}
        again = await ask(client, "b")
        assert "x-queue-place" not in again.headers and scripted.engines["b"].starts == 1
        assert len(again.headers.get_list("x-request-id")) == 1


async def test_who_names_no_model_gets_the_first_that_takes_the_path(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b") as client:
        for model in (None, "default"):
            assert (await ask(client, model)).json()["model"] == "a"


async def test_a_model_that_is_not_there_is_told_with_those_that_are(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b") as client:
        error = error_of(await ask(client, "c"), 404, "model")
        assert "'c'" in error["message"] and "'a', 'b'" in error["message"]
        assert error["code"] == "model_not_found"
        assert (await client.get("/v1/models/c")).status_code == 404
        assert (await client.post("/v1/models/load", json={"model": "c"})).status_code == 404


@pytest.mark.parametrize(
    ("content", "param"),
    [(b"", None), (b"{", None), (b"[1]", None), (b'{"model": 5}', "model"), (b"[" * 9999, None)],
)
async def test_a_body_that_is_wrong_loads_nothing(
    scripted: ScriptedFleet, content: bytes, param: str | None
) -> None:
    async with served(scripted, "a") as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/v1/completions", content=content, headers=headers)
        error_of(answer, 400, param)
        assert await states(client) == {"a": "unloaded"}


async def test_paths_and_methods_are_known_before_a_model_is_loaded(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a") as client:
        error_of(await client.get("/v1/completions"), 405)
        error_of(await client.post("/v1/embeddings", json={"model": "a", "input": "x"}), 404)
        error_of(await client.get("/get_model_info"), 503)
        assert await states(client) == {"a": "unloaded"}
        await ask(client, "a")
        assert (await client.get("/get_model_info?model=a")).status_code == 200


async def test_documents_and_figures_are_of_all(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b") as client:
        assert (await client.get("/v1/status")).json()["state"] == "ready"
        await ask(client, "a")
        await ask(client, "b")
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/v1/chat/completions", "/v1/models/load", "/v1/batches", "/health"} <= set(paths)
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/v1/status?model=a")).json()["model"] == "a"
        assert (await client.get("/v1/status")).json()["model"] == "b"
        figures = (await client.get("/metrics")).text
        series = [line.rpartition(" ")[0] for line in figures.splitlines() if line[0] != "#"]
        assert len(series) == len(set(series))
        assert figures.count("# TYPE piecework:num_requests_total ") == 1
        assert 'piecework:model_load_seconds_count{model_name="a"} 1.0' in figures


async def test_stored_responses_can_be_read_and_continued_whichever_model_is_loaded(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        body = {"model": "a", "input": "Hi", "max_output_tokens": 4}
        first = await client.post("/v1/responses", json=body)
        assert first.status_code == 200, first.text
        body = {**body, "model": "b", "previous_response_id": first.json()["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
        assert second["model"] == "b"
        await client.post("/v1/models/unload", json={"model": "b"})
        for response in (first.json(), second):
            found = await client.get(f"/v1/responses/{response['id']}")
            assert found.json()["model"] == response["model"]


async def test_each_line_of_a_batch_goes_to_its_model(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions",
             "body": {**BODY, "model": model}}
            for number, model in enumerate("abab")
        ]  # fmt: skip
        content = "\n".join(map(json.dumps, lines)).encode()
        uploaded = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
        )
        asked = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = (await client.post("/v1/batches", json=asked)).json()
        for _ in range(500):
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            if batch["status"] in ("completed", "failed"):
                break
            await asyncio.sleep(0.02)
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        output = await client.get(f"/v1/files/{batch['output_file_id']}/content")
        answers = [json.loads(line) for line in output.text.splitlines()]
        told = {each["custom_id"]: each["response"]["body"]["model"] for each in answers}
        assert told == {"0": "a", "1": "b", "2": "a", "3": "b"}


async def test_the_key_is_asked_for_once_and_before_anything_is_loaded(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", api_key="secret") as client:
        error_of(await ask(client, "a"), 401)
        assert await _listed(client) == 401 and not scripted.engines
        client.headers["Authorization"] = "Bearer secret"
        assert (await ask(client, "a")).status_code == 200


async def test_a_key_sees_and_asks_its_models_alone(
    scripted: ScriptedFleet, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    lines = [
        f"- {{name: k{number}, sha256: {hash_of(f'key{number}'.encode())}, models: [{model}]}}"
        for number, model in enumerate(("b", "x"))
    ]
    keys.write_text("\n".join(lines))
    async with served(scripted, "a", "b", api_keys=str(keys)) as client:
        client.headers["Authorization"] = "Bearer key0"
        assert list(await states(client)) == ["b"]
        assert (await ask(client, None)).json()["model"] == "b"
        error_of(await ask(client, "a"), 404, "model")
        error_of(await client.get("/v1/status?model=a"), 404, "model")
        error_of(await client.post("/v1/models/unload", json={"model": "b"}), 403)
        assert list(scripted.engines) == ["b"]
        client.headers["Authorization"] = "Bearer key1"
        listed = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert listed.json()["data"] == []


async def _listed(client: httpx.AsyncClient) -> int:
    return (await client.get("/v1/models")).status_code


async def test_the_longest_unused_gives_way(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", "c", fleet_memory=2.5) as client:
        for model in ("a", "b", "a", "c"):
            assert (await ask(client, model)).status_code == 200
        assert await states(client) == {"a": "ready", "b": "unloaded", "c": "ready"}


async def test_what_is_pinned_stays_and_is_told(scripted: ScriptedFleet) -> None:
    async with served(
        scripted, "a", "b", fleet_memory=1.5, a={"pinned": True, "preload": True}
    ) as client:
        assert await states(client) == {"a": "ready", "b": "unloaded"}
        error = error_of(await ask(client, "b"), 503)
        assert error["code"] == "model_does_not_fit" and "a 1.00 GiB" in error["message"]
        assert (await ask(client, "a")).status_code == 200


async def test_a_model_with_requests_is_not_ended_for_another(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        engine, first, other = await contend(scripted, client)
        # It takes no more, so that the other's turn comes.
        late = asyncio.create_task(ask(client, "a"))
        await asyncio.sleep(0.05)
        assert engine.stops == 0 and not other.done() and not late.done()
        assert (await states(client))["b"] == "queued"
        engine.script.held = False
        answers = await asyncio.gather(first, other, late)
        assert [each.json()["model"] for each in answers] == ["a", "b", "a"]


async def test_a_busy_model_goes_on_when_nobody_waits_for_its_room_any_more(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a", "b", max_loaded_models=1) as client:
        engine, first, other = await contend(scripted, client)
        late = asyncio.create_task(ask(client, "a"))
        await until(lambda: scripted.fleet.waiting_for(scripted.fleet.members["a"]) == 1)
        other.cancel()
        await until(lambda: len(engine.running) == 2)
        engine.script.held = False
        assert (await first).status_code == (await late).status_code == 200
        assert scripted.fleet.num_unfinished == 0 and engine.starts == 1


async def test_a_client_that_goes_leaves_the_queue(scripted: ScriptedFleet) -> None:
    scripted.prepare = lambda engine: engine.may_start.clear()
    async with served(scripted, "a") as client:
        asked = asyncio.create_task(ask(client, "a"))
        member = scripted.fleet.members["a"]
        await until(lambda: "a" in scripted.engines)
        asked.cancel()
        await until(lambda: scripted.fleet.waiting_for(member) == 0)
        scripted.engines["a"].may_start.set()
        await until(lambda: member.state is MemberState.READY)
        assert member.under_way == 0 and member.is_idle


async def test_the_queue_is_bounded_and_says_how_many_wait(scripted: ScriptedFleet) -> None:
    scripted.prepare = lambda engine: engine.may_start.clear()
    async with served(scripted, "a", max_queued_requests=2) as client:
        asked = [asyncio.create_task(ask(client, "a")) for _ in range(2)]
        await until(lambda: scripted.fleet.num_unfinished == 2)
        refused = await ask(client, "a")
        assert "2 requests wait" in error_of(refused, 503)["message"]
        assert int(refused.headers["retry-after"]) >= 1
        await until(lambda: "a" in scripted.engines)
        scripted.engines["a"].may_start.set()
        places = [(await each).headers["x-queue-place"] for each in asked]
        assert places == ["1", "2"]


async def test_a_model_that_cannot_be_loaded_fails_and_no_other_does(
    scripted: ScriptedFleet,
) -> None:
    def prepare(engine: LoadableEngine) -> None:
        engine.fault = "no weights\nin there" if engine.name == "a" else None

    scripted.prepare = prepare
    async with served(scripted, "a", "b") as client:
        for _ in range(2):  # the second is refused at once
            answer = await ask(client, "a")
            error = error_of(answer, 503)
            assert "no weights in there" in error["message"] and error["code"] == "model_failed"
            assert int(answer.headers["retry-after"]) > 1
        assert scripted.engines["a"].starts == 1
        assert (await ask(client, "b")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        scripted.engines["a"].fault = None
        loaded = await client.post("/v1/models/load", json={"model": "a"})
        assert loaded.json()["status"]["value"] == "ready"


async def test_an_engine_that_is_given_up_is_loaded_again_later(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, "a", "b") as client:
        await ask(client, "a")
        await ask(client, "b")
        scripted.engines["a"].break_down("it crashed too often")
        await until_state(scripted, "a", MemberState.FAILED)
        assert "crashed too often" in error_of(await ask(client, "a"), 503)["message"]
        assert (await ask(client, "b")).status_code == 200
        scripted.fleet.members["a"].retry_at = 0.0
        assert (await ask(client, "a")).status_code == 200


async def test_idle_models_are_unloaded(scripted: ScriptedFleet) -> None:
    own = {"b": {"idle_unload": 0.0}, "c": {"pinned": True}}
    async with served(scripted, "a", "b", "c", idle_unload=0.05, **own) as client:
        for model in ("a", "b", "c"):
            await ask(client, model)
        await until_state(scripted, "a", MemberState.SLEEPING)
        assert await states(client) == {"a": "sleeping", "b": "ready", "c": "ready"}


async def test_unloading_waits_for_requests_and_loading_again_keeps_what_was_counted(
    scripted: ScriptedFleet,
) -> None:
    async with served(scripted, "a") as client:
        await ask(client, "a")
        engine = scripted.engines["a"]
        engine.script.held = True
        asked = asyncio.create_task(ask(client, "a"))
        await until(lambda: bool(engine.running))
        unloading = asyncio.create_task(client.post("/v1/models/unload", json={"model": "a"}))
        await asyncio.sleep(0.05)
        assert not unloading.done()
        engine.script.held = False
        assert (await asked).status_code == 200
        assert (await unloading).json()["status"]["value"] == "unloaded"
        await ask(client, "a")
        metrics = (await client.get("/metrics")).text
        assert 'piecework:num_requests_total{model_name="a"} 3.0' in metrics
        assert 'piecework:model_unloads_total{model_name="a",reason="asked"} 1.0' in metrics


async def test_a_model_that_outgrows_the_memory_has_an_idle_one_unloaded(
    scripted: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, "a", "b", fleet_memory=3) as client:
        await ask(client, "a")
        await ask(client, "b")
        monkeypatch.setattr(fleet_module, "resident_memory", lambda pids: 2 * GIB)
        await until_state(scripted, "a", MemberState.UNLOADED)
        assert scripted.engines["a"].stops == 1
        await scripted.fleet._check_memory()  # `b` has room enough now, and stays.
        assert scripted.fleet.members["b"].closing is None
        assert await states(client) == {"a": "unloaded", "b": "ready"}
        assert scripted.fleet.members["b"].size == 2 * GIB


def test_weights_that_have_no_room_beside_the_pinned_ones_are_told_at_the_start(
    scripted: ScriptedFleet, tmp_path: Path
) -> None:
    tensors = {"a": np.zeros(2**19, np.float32)}  # 2 MiB, of which an engine keeps half
    save_file(tensors, tmp_path / "model.safetensors")
    config = scripted.config("a", "b", a={"pinned": True}, fleet_memory=3 / 1024)
    check_room(config.members, 2**21 + 2**12)
    with pytest.raises(
        ValueError, match=r"weights of b .* do not fit: .* pinned models take a 0.00 GiB"
    ):
        check_room(config.members, 2**20 + 2**19)


class _Moves:
    """Requests of three models, that begin and end as hypothesis says."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.inside: dict[str, int] = dict.fromkeys(fleet.members, 0)
        self.done = 0

    async def ask(self, member: Member, turns: int) -> None:
        async with self.fleet.use(member):
            assert member.admits or member.closing is not None
            self.inside[member.name] += 1
            for _ in range(turns):
                await asyncio.sleep(0)
                assert member.state is MemberState.READY
            self.inside[member.name] -= 1
        self.done += 1


_ASKED = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=15)
@given(asked=_ASKED, memory=st.integers(1, 3))
def test_all_are_answered_within_the_memory(
    asked: list[tuple[str, int, bool]], memory: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def run(scripted: ScriptedFleet) -> None:
        service = scripted.service("a", "b", "c", fleet_memory=memory + 0.5)
        fleet, moves = scripted.fleet, _Moves(scripted.fleet)
        await fleet.start()
        tasks = []
        for name, turns, goes in asked:
            task = asyncio.create_task(moves.ask(fleet.members[name], turns))
            await asyncio.sleep(0)
            task.cancel() if goes and turns % 2 else None
            tasks.append(task)
        for _ in range(3000):
            loaded = sum(each.holds_memory for each in fleet.members.values())
            assert loaded <= memory
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0.001)
        gone = sum(task.cancelled() for task in tasks)
        assert moves.done + gone == len(tasks) and fleet.num_unfinished == 0
        assert all(each.under_way == 0 for each in fleet.members.values())
        await service.engine.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "_SWITCH_SECONDS", 0.0)
        asyncio.run(run(ScriptedFleet(tmp_path_factory.mktemp("fleet"), patch)))


async def test_a_body_that_may_be_left_out_may_be_here_too(scripted: ScriptedFleet) -> None:
    async with served(scripted, "a") as client:
        await ask(client, "a")
        for path in ("/start_profile", "/start_profile?model=a"):
            assert error_of(await client.post(path), 400)["code"] == "profiles_off"
        assert (await client.post("/v1/completions")).status_code == 415
