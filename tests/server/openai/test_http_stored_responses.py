"""Responses that are kept, followed, fetched, forgotten, and made in the background."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app, serve
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.server.openai.responses import job, service
from piecework.server.openai.responses.store import ResponseStore
from piecework.server.openai.stored.database import Database, connect
from piecework.server.openai.stored.kept import check_store
from piecework.server.serving.state import TextThreads

PATH = "/v1/responses"
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))


@pytest.fixture(autouse=True)
def no_long_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CLOSE_SECONDS", 0.05)


@pytest.fixture
async def client(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with server(engine, tmp_path) as client:
        yield client


class server:
    """One life of a server whose store lies in `folder`."""

    def __init__(self, engine: ScriptedEngine, folder: Path, **settings: Any) -> None:
        settings.setdefault("responses_store", str(folder / "kept.sqlite"))
        self.app = make_app(engine, **settings)
        self._client = client_of(self.app)

    async def __aenter__(self) -> httpx.AsyncClient:
        return await self._client.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(None, None, None)
        await self.app.state.responses.close()
        await self.app.state.kept.close()
        self.app.state.kept.thread.shutdown()


async def create(client: httpx.AsyncClient, text: str = "Hi", **body: Any) -> dict[str, Any]:
    answer = await client.post(
        PATH, json={"model": MODEL, "input": text, "max_output_tokens": 2, **body}
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def retrieve(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    answer = await client.get(f"{PATH}/{response_id}")
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    told: dict[str, Any] = answer.json()
    return told


async def poll(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    for _ in range(500):
        told = await retrieve(client, response_id)
        if told["status"] not in ("queued", "in_progress"):
            return told
        await service.asyncio.sleep(0.01)
    raise AssertionError("it goes on for too long")


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


async def test_a_conversation_goes_on_from_its_last_response(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = await create(client, "One", instructions="Kind.")
    second = await create(client, "Two", previous_response_id=first["id"])
    third = await create(client, "Three", previous_response_id=second["id"])
    said = [one["output"][0]["content"][0]["text"] for one in (first, second)]
    assert prompt(engine) == f"[One][{said[0]}][Two][{said[1]}][Three]"
    assert await retrieve(client, third["id"]) == third
    pages, after = [], None
    while True:
        asked = {"limit": 2, "order": "asc", **({"after": after} if after else {})}
        page = (await client.get(f"{PATH}/{third['id']}/input_items", params=asked)).json()
        ResponseItemList.model_validate(page)
        pages.append(page["data"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    items = [item for page in pages for item in page]
    assert [item["content"][0]["text"] for item in items] == [
        "One", said[0], "Two", said[1], "Three"
    ]  # fmt: skip
    newest = (await client.get(f"{PATH}/{third['id']}/input_items")).json()["data"]
    assert newest == items[::-1]
    error_of(
        await client.get(f"{PATH}/{third['id']}/input_items", params={"after": "x"}), 404, "after"
    )


async def test_pages_end_where_items_share_an_id(client: httpx.AsyncClient) -> None:
    items = [{"id": name, "role": "user", "content": name} for name in ("a", "b", "a", "c")]
    answer = await create(client, input=items)
    after: str | None = None
    shown = []
    for _ in items:
        asked = {"limit": 1, "order": "asc", **({"after": after} if after else {})}
        page = (await client.get(f"{PATH}/{answer['id']}/input_items", params=asked)).json()
        after = page["last_id"]
        shown.append(after)
    assert shown[:3] == ["a", "b", "c"]


async def test_what_is_forgotten_is_gone_and_what_follows_it_says_so(
    client: httpx.AsyncClient,
) -> None:
    first = await create(client)
    second = await create(client, previous_response_id=first["id"])
    gone = await client.delete(f"{PATH}/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    error_of(await client.get(f"{PATH}/{first['id']}"), 404, "response_id")
    error_of(await client.delete(f"{PATH}/{first['id']}"), 404, "response_id")
    assert (await retrieve(client, second["id"]))["status"] == "incomplete"
    asked = {"model": MODEL, "input": "Hi", "previous_response_id": second["id"]}
    error = error_of(await client.post(PATH, json=asked), 404, "previous_response_id")
    assert first["id"] in error["message"] and second["id"] in error["message"]


async def test_an_item_can_be_named_instead_of_sent(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    first = await create(client)
    (item,) = first["output"]
    known: Any = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item["id"]}]
    await create(client, known)
    assert prompt(engine) == f"[Hi][{item['content'][0]['text']}]"
    error_of(
        await client.post(PATH, json={"model": MODEL, "input": [{"id": "msg_1"}]}), 404, "input"
    )
    error_of(
        await client.post(PATH, json={"model": MODEL, "input": [{"id": item["id"]}] * 2}),
        400,
        "input",
    )


async def test_a_long_history_is_worked_on_beside_the_event_loop(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads: list[Any] = []
    run = TextThreads.run

    async def watched(self: TextThreads, work: Any, *args: Any, **settings: Any) -> Any:
        in_threads.append(getattr(work, "func", work).__name__)
        return await run(self, work, *args, **settings)

    monkeypatch.setattr(TextThreads, "run", watched)
    life = server(engine, tmp_path)
    async with life as client:
        told = await create(client)
        told["output"][0]["content"][0]["text"] = "x " * 10_000
        responses = life.app.state.responses
        life.app.state.kept.thread.submit(responses._store.put, told, []).result()
        in_threads.clear()
        asked = {"model": MODEL, "input": "Hi", "previous_response_id": told["id"]}
        error_of(await client.post(PATH, json=asked), 400, "input")
    assert in_threads[0] == "render_chat"


async def test_ids_cannot_be_guessed_and_reach_nothing_else(client: httpx.AsyncClient) -> None:
    ids = {(await create(client))["id"] for _ in range(4)}
    assert len(ids) == 4 and all(re.fullmatch(r"resp_[0-9a-f]{32}", one) for one in ids)
    for wrong in ("resp_1", "%", "' OR 1=1 --", "..%2f..%2fkept.sqlite", "x" * 4000):
        assert (await client.get(f"{PATH}/{wrong}")).status_code == 404
        assert (await client.post(f"{PATH}/{wrong}/cancel")).status_code == 404
        asked = {"model": MODEL, "input": "Hi", "previous_response_id": wrong}
        error_of(await client.post(PATH, json=asked), 404, "previous_response_id")


@pytest.mark.parametrize("store", ["off", "memory"])
async def test_a_server_may_keep_nothing_on_the_disk(
    engine: ScriptedEngine, tmp_path: Path, store: str
) -> None:
    async with server(engine, tmp_path, responses_store=store) as client:
        told = await create(client)
        assert told["store"] is (store == "memory")
        kept = await client.get(f"{PATH}/{told['id']}")
        assert kept.status_code == (404 if store == "off" else 200)
        forgotten = await create(client, store=False)
        error_of(await client.get(f"{PATH}/{forgotten['id']}"), 404, "response_id")
        if store == "off":
            for name, value in (("previous_response_id", told["id"]), ("background", True)):
                refused = await client.post(PATH, json={"model": MODEL, "input": "Hi", name: value})
                assert "--responses-store" in error_of(refused, 400, name)["message"]
    assert not list(tmp_path.iterdir())


async def test_responses_outlive_the_server_and_nobody_else_reads_them(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    async with server(engine, tmp_path) as client:
        done = await create(client)
        engine.script.held = True
        running = await create(client, background=True)
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        life = client
    async with server(engine, tmp_path) as client:
        assert client is not life
        assert await retrieve(client, done["id"]) == done
        broken = await retrieve(client, running["id"])
        assert broken["status"] == "failed" and "create it again" in broken["error"]["message"]
        asked = {"model": MODEL, "input": "Hi", "previous_response_id": running["id"]}
        error_of(await client.post(PATH, json=asked), 400, "previous_response_id")


async def test_a_response_is_made_without_a_client(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script.held = True
    told = await create(client, background=True)
    assert (told["status"], told["usage"], told["output"]) == ("queued", None, [])
    assert (await retrieve(client, told["id"]))["status"] == "queued"
    asked = {"model": MODEL, "input": "Hi", "previous_response_id": told["id"]}
    error_of(await client.post(PATH, json=asked), 400, "previous_response_id")
    engine.script.held = False
    done = await poll(client, told["id"])
    assert done["status"] == "incomplete" and done["usage"]["output_tokens"] == 2
    assert (await client.post(f"{PATH}/{told['id']}/cancel")).json() == done
    assert (await create(client, previous_response_id=told["id"]))["status"] == "incomplete"


@pytest.mark.parametrize("way", ["cancel", "delete", "engine"])
async def test_the_end_of_a_background_response_frees_what_it_had(
    client: httpx.AsyncClient, engine: ScriptedEngine, way: str
) -> None:
    engine.script.held = way != "engine"
    engine.script.fail_after = 1
    told = await create(client, background=True)
    path = f"{PATH}/{told['id']}"
    if way == "delete":
        await client.delete(path)
        error_of(await client.get(path), 404, "response_id")
    elif way == "cancel":
        cancelled = (await client.post(f"{path}/cancel")).json()
        assert cancelled["status"] == "cancelled" and cancelled["usage"]["output_tokens"] == 0
        assert await retrieve(client, told["id"]) == cancelled
    else:
        failed = await poll(client, told["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert not engine.running and client is not None


def test_a_stream_of_the_background_goes_on_where_its_client_was_cut_off(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script.delay = 0.002
    asked: Any = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 20}
    app = make_app(engine, responses_store="memory")
    with (
        serve(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        stream = client.responses.create(**asked, stream=True)
        events = [next(stream) for _ in range(8)]
        stream.close()
        response_id = events[0].response.id  # type: ignore[union-attr]
        events += client.responses.retrieve(response_id, stream=True, starting_after=7)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        last = events[-1]
        assert last.type == "response.incomplete"
        told = "".join(one.delta for one in events if one.type == "response.output_text.delta")
        assert (
            told == last.response.output_text == client.responses.retrieve(response_id).output_text
        )
        again = list(client.responses.retrieve(response_id, stream=True))
        assert [event.type for event in again] == kinds
        assert not engine.dropped
        whole = client.responses.create(**asked)
        with pytest.raises(openai.BadRequestError, match="has no stream"):
            client.responses.retrieve(whole.id, stream=True)
        monkeypatch.setattr(job, "MAX_EVENT_BYTES", 6000)
        *_, cut = client.responses.create(**asked, stream=True)
        assert cut.type == "error" and cut.code == "stream_too_long"


async def test_only_what_runs_in_the_background_is_cancelled(client: httpx.AsyncClient) -> None:
    told = await create(client)
    error_of(await client.post(f"{PATH}/{told['id']}/cancel"), 400, "response_id")


async def test_a_flood_of_background_responses_is_refused(
    client: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script.held, engine.script.room = True, 3
    asked = {"model": MODEL, "input": "Hi", "background": True}
    codes = [(await client.post(PATH, json=asked)).status_code for _ in range(5)]
    assert codes == [200] * 3 + [503] * 2
    engine.script.room = 100
    monkeypatch.setattr(service, "_MAX_BACKGROUND_BYTES", 100)
    refused = await client.post(PATH, json={**asked, "input": "Hi there"})
    assert error_of(refused, 503)["code"] == "background_full"
    assert len(engine.running) == 3


async def test_a_full_disk_costs_storing_and_never_the_answer(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    life = server(engine, tmp_path)
    async with life as client:
        first = await create(client)

        def fill() -> None:
            life.app.state.kept.database._connection.execute("PRAGMA max_page_count = 1").fetchall()

        life.app.state.kept.thread.submit(fill).result()
        large = {f"{number}": "x" * 512 for number in range(16)}
        second = await create(client, metadata=large)
        assert second["status"] == "incomplete"
        error_of(await client.get(f"{PATH}/{second['id']}"), 404, "response_id")
        background = await create(client, metadata=large, background=True)
        assert (await poll(client, background["id"]))["status"] == "incomplete"
        assert await retrieve(client, first["id"]) == first


def opened(path: str, **settings: Any) -> ResponseStore:
    return ResponseStore(Database(path, **settings))


def stored(store: ResponseStore, name: str, size: int) -> None:
    response = {
        "id": f"resp_{name}",
        "previous_response_id": None,
        "status": "completed",
        "output": [],
    }
    store.put({**response, "text": "x" * size}, [])


def test_the_store_is_bounded_in_bytes_and_in_age(tmp_path: Path) -> None:
    now = 1000.0
    path = tmp_path / "kept.sqlite"
    store = opened(str(path), max_bytes=2**20, max_age=100, clock=lambda: now)
    for number in range(40):
        now += 1
        stored(store, str(number), 100_000)
        store.history("resp_0")
    assert (
        store.get("resp_0") is not None
        and store.get("resp_39") is not None
        and store.get("resp_1") is None
    )
    assert path.stat().st_size < 2 * 2**20
    stored(store, "large", 2**20)
    assert store.get("resp_large") is None and store.get("resp_39") is not None
    now += 101
    assert store.get("resp_39") is None
    stored(store, "new", 1)
    assert store._database._size < 10_000
    store._database.close()


def test_a_file_that_cannot_be_used_is_told_of_at_the_start_or_costs_its_contents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other, used = tmp_path / "broken", tmp_path / "other", tmp_path / "used"
    broken.write_bytes(b"no database" * 1000)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE responses (id)")
    for _ in range(2):  # made anew, and opened again
        holder = opened(str(used), max_bytes=2**20, max_age=1)
        stored(holder, "x", 1)
        assert {file.name for file in tmp_path.glob("used*")} == {"used", "used-wal"}
        holder._database.close()
    stored(holder, "x", 1)
    engine = ScriptedEngine(toy_tokenizer())
    for file in (broken, other, used, tmp_path, tmp_path / "broken" / "below"):
        config = make_app(engine, responses_store=str(file)).state.serving.config
        with pytest.raises(ValueError, match=r"--responses-store .*; name another file"):
            check_store(config)
        store = opened(str(file), max_bytes=2**20, max_age=1000)
        stored(store, "x", 1)
        assert store.get("resp_x") is not None
        store._database.close()
    assert caplog.text.count("kept in memory alone") == 5
    holder._database.close()
    config = make_app(engine, responses_store=str(used)).state.serving.config
    check_store(config)


def test_another_application_of_the_process_leaves_the_file_locked(tmp_path: Path) -> None:
    path = str(tmp_path / "kept.sqlite")
    holder = opened(path, max_bytes=2**20, max_age=1000)
    stored(holder, "x", 1)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        connect(path)
    program = "import sys; from piecework.server.openai.stored.database import connect"
    other = subprocess.run(
        [sys.executable, "-c", f"{program}; connect(sys.argv[1])", path],
        capture_output=True,
        text=True,
    )
    assert "database is locked" in other.stderr
    holder._database.close()


def test_a_link_to_a_file_that_is_not_there_yet_makes_a_private_file(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "conversations"
    link.symlink_to(target)
    before = os.umask(0)
    try:
        connect(str(link)).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
