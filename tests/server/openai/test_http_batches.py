"""Batches: every line is answered once, whatever ends meanwhile, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from batch_fixtures import COMPLETIONS, create, ended, line, lines_of, served, upload
from http_fixtures import error_of
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.server.config.keys import hash_of
from piecework.server.engine.state import EngineState
from piecework.server.openai.batches import lines as batch_lines
from piecework.server.openai.batches import runner
from piecework.server.openai.batches.storage import StorageFull


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_LOOK", 0.01)
    monkeypatch.setattr(runner, "_TRY_AGAIN", 0.01)


@pytest.mark.parametrize("several", [False, True])
async def test_each_line_is_answered(
    scripted: ScriptedEngine, tmp_path: Path, several: bool
) -> None:
    """Its own key is the server's, or one of a file."""
    key = {"api_key": "k"}
    if several:
        key = {"api_keys": str(tmp_path / "keys")}
        (tmp_path / "keys").write_text(
            json.dumps({"name": "a", "sha256": hash_of(b"k"), "admin": True, "concurrency": 1})
        )
    async with served(scripted, tmp_path, **key) as (_, client):
        file_id = await upload(client, [line("a"), line("b"), line("c", model="other")])
        batch = await create(client, file_id, metadata={"who": "me"})
        assert batch["status"] == "validating" and batch["metadata"] == {"who": "me"}
        batch = await ended(client, batch["id"])
        assert batch["status"] == "completed" and batch["completed_at"] >= batch["in_progress_at"]
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        good = await lines_of(client, batch["output_file_id"])
        assert [each["custom_id"] for each in good] == ["a", "b"]
        for each in good:
            assert each["error"] is None and each["response"]["status_code"] == 200
            assert each["response"]["body"]["object"] == "text_completion"
            assert each["response"]["request_id"]
        (bad,) = await lines_of(client, batch["error_file_id"])
        assert bad["response"]["status_code"] == 404
        assert bad["response"]["body"]["error"]["code"] == "model_not_found"
        listed = (await client.get("/v1/files?purpose=batch_output")).json()
        assert {each["id"] for each in listed["data"]} == {
            batch["output_file_id"],
            batch["error_file_id"],
        }
    assert {request.priority for request in scripted.requests} == {runner.LOWEST_PRIORITY}


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"{", "invalid_json_line", 1),
        (b"[]", "invalid_json_line", 1),
        (b"[" * 5000, "invalid_json_line", 1),
        (b'{"body": [' + b"{}," * 100_000 + b"{}]}", "line_too_complex", 1),
        (b"\xff", "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a") | {"custom_id": 7}], "invalid_value", 1),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([line("a") | {"url": "/v1/models"}], "invalid_url", 1),
        ([line("a") | {"body": "x"}], "invalid_value", 1),
        ([line("a", stream=True)], "invalid_value", 1),
        ([line("x" * 600)], "invalid_value", 1),
        ([line(str(number)) for number in range(6)], "too_many_requests", 6),
    ],
)
async def test_a_file_with_a_wrong_line_asks_nothing(
    scripted: ScriptedEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: Any,
    code: str,
    number: int | None,
) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 5)
    async with served(scripted, tmp_path) as (_, client):
        batch = await ended(client, (await create(client, await upload(client, lines)))["id"])
    assert batch["status"] == "failed" and not scripted.requests
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, number) and "\n" not in error["message"]


async def test_a_line_that_is_too_long(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "MAX_BODY_BYTES", 200)
    async with served(scripted, tmp_path) as (_, client):
        file_id = await upload(client, [line("a"), line("b", user="x" * 300), line("c")])
        batch = await ended(client, (await create(client, file_id))["id"])
    assert [error["code"] for error in batch["errors"]["data"]] == ["line_too_long"]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": "/health"}, "endpoint"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
async def test_a_batch_that_cannot_be(
    scripted: ScriptedEngine, tmp_path: Path, members: dict[str, Any], param: str
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        body = {
            "input_file_id": await upload(client, [line("a")]),
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        error_of(await client.post("/v1/batches", json=body | members), 400, param)
        error_of(await client.get("/v1/batches/none"), 404, "batch_id")


async def holding(scripted: ScriptedEngine, answered: int) -> None:
    """Wait until so many lines have come and the next ones wait for tokens."""
    while len(scripted.requests) < answered or not scripted.running:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("crash", [False, True])
async def test_the_next_server_asks_what_has_no_answer(
    scripted: ScriptedEngine, tmp_path: Path, crash: bool
) -> None:
    names = [f"line {number}" for number in range(9)]
    async with served(scripted, tmp_path) as (app, client):
        batch_id = (await create(client, await upload(client, [*map(line, names)])))["id"]
        while len(scripted.requests) < 6:
            await asyncio.sleep(0)
        scripted.script.held = True
        storage = await app.state.batches.storage()
        batch = storage.batches[batch_id]
        while (
            len(scripted.running) < 9 - batch.request_counts.completed and len(scripted.running) < 6
        ):
            await asyncio.sleep(0.01)
        scripted.state = EngineState.DRAINING
        await asyncio.sleep(0.05)
        assert not scripted.running
        done = batch.request_counts.completed
        if crash:
            with open(storage.results(batch, "output"), "ab") as file:
                file.write(b'{"custom_id": "line 8", "respo')
    again = ScriptedEngine(toy_tokenizer())
    async with served(again, tmp_path) as (_, client):
        batch_told = await ended(client, batch_id)
        assert batch_told["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
        answers = await lines_of(client, batch_told["output_file_id"])
    assert [each["custom_id"] for each in answers] == names
    assert 0 < done < 9 and len(again.requests) == 9 - done


async def test_a_cancelled_batch_keeps_what_has_been_answered(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.held = True
        batch_id = (await create(client, await upload(client, [line("a"), line("b")])))["id"]
        await holding(scripted, 2)
        told = (await client.post(f"/v1/batches/{batch_id}/cancel")).json()
        assert told["status"] in ("cancelling", "cancelled")
        batch = await ended(client, batch_id)
        assert batch["status"] == "cancelled" and batch["output_file_id"] is None
        assert not scripted.running and len(scripted.dropped) == 2
        error_of(await client.post(f"/v1/batches/{batch_id}/cancel"), 400, "batch_id")


async def test_a_batch_that_waits_is_cancelled_at_once(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.held = True
        file_id = await upload(client, [line("a")])
        first = await create(client, file_id)
        await holding(scripted, 1)
        second = (await create(client, file_id))["id"]
        assert (await client.post(f"/v1/batches/{second}/cancel")).json()["status"] == "cancelled"
        scripted.script.held = False
        assert (await ended(client, first["id"]))["status"] == "completed"


async def test_lines_that_are_late_get_an_error(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (app, client):
        scripted.script.held = True
        batch_id = (await create(client, await upload(client, [line("a"), line("b")])))["id"]
        await holding(scripted, 2)
        storage = await app.state.batches.storage()
        storage.clock = lambda: storage.batches[batch_id].expires_at + 1
        batch = await ended(client, batch_id)
        errors = await lines_of(client, batch["error_file_id"])
    assert batch["status"] == "expired" and batch["request_counts"]["failed"] == 2
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 2


async def test_lines_leave_room_for_others(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.held = True
        others = [
            asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}))
            for _ in range(4)
        ]
        await holding(scripted, 4)
        lines = [line(str(number)) for number in range(20)]
        batch_id = (await create(client, await upload(client, lines)))["id"]
        await holding(scripted, 6)
        await asyncio.sleep(0.1)
        assert len(scripted.running) == 6  # three quarters of eight
        scripted.script.held = False
        assert all([(await other).status_code == 200 for other in others])
        assert (await ended(client, batch_id))["request_counts"]["completed"] == 20


async def test_a_full_queue_is_waited_for(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.room = 0
        batch_id = (await create(client, await upload(client, [line("a")])))["id"]
        await asyncio.sleep(0.1)
        scripted.script.room = 9
        assert (await ended(client, batch_id))["request_counts"]["completed"] == 1


async def test_a_batch_whose_answers_find_no_room_ends(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(scripted, tmp_path) as (app, client):
        file_id = await upload(client, [line("a"), line("b")])
        storage = await app.state.batches.storage()

        def full(size: int) -> None:
            raise StorageFull("no room")

        monkeypatch.setattr(storage, "claim", full)
        batch = await ended(client, (await create(client, file_id))["id"])
        monkeypatch.undo()
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "storage_full"
        assert (await client.get("/health")).status_code == 200


async def test_a_line_that_nobody_foresaw_ends_alone(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        if len(asked) < 3:
            asked.append(1)
            raise ZeroDivisionError

    asked: list[int] = []
    monkeypatch.setattr(scripted, "require_room", broken)
    async with served(scripted, tmp_path) as (_, client):
        batch = await create(client, await upload(client, [line(name) for name in "abcde"]))
        batch = await ended(client, batch["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
        for each in await lines_of(client, batch["error_file_id"]):
            assert each["response"]["body"]["error"]["code"] == "internal_error"


async def test_what_is_uploaded_under_the_name_of_answers_does_not_take_their_place(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.held = True
        batch = await create(client, await upload(client, [line("a")]))
        name = f"{batch['id']}_output.jsonl"
        form = {"files": {"file": (name, b"{}")}, "data": {"purpose": "batch"}}
        other = (await client.post("/v1/files", **form)).json()
        scripted.script.held = False
        batch = await ended(client, batch["id"])
        assert batch["output_file_id"] not in (None, other["id"])
        (answer,) = await lines_of(client, batch["output_file_id"])
        assert answer["custom_id"] == "a"


async def test_batches_are_listed_in_pages(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (_, client):
        file_id = await upload(client, [line("a")])
        ids = [(await create(client, file_id))["id"] for _ in range(3)][::-1]
        first = (await client.get("/v1/batches?limit=2")).json()
        assert [each["id"] for each in first["data"]] == ids[:2] and first["has_more"]
        rest = (await client.get(f"/v1/batches?after={first['last_id']}")).json()
        assert [each["id"] for each in rest["data"]] == ids[2:] and not rest["has_more"]
        error_of(await client.get("/v1/batches?after=none"), 400, "after")
        error_of(await client.get("/v1/batches?limit=0"), 400, "limit")


async def test_a_line_that_would_fill_the_queue_is_refused(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    lines = [
        line("ids", prompt=[5] * 100),
        line("many", prompt=["a"] * 501),
        line("samples", prompt=["a"] * 9, n=100),
        line("some", prompt=["a"] * 9, n=2),
    ]
    async with served(scripted, tmp_path) as (_, client):
        batch = await ended(client, (await create(client, await upload(client, lines)))["id"])
        refused = await lines_of(client, batch["error_file_id"])
    assert [each["custom_id"] for each in refused] == ["many", "samples"]
    assert {each["error"]["code"] for each in refused} == {"too_many_sequences"}
    assert len(scripted.requests) == 1 + 18
