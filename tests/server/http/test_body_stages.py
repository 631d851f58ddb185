"""Bodies become prompts a few at a time, by what they cost, and are gone afterwards."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app
from scripted_engine import ScriptedEngine

from piecework.server.http import body as bodies
from piecework.server.http.turns import TURN_WEIGHT, Room, Turns
from piecework.server.openai import tokenize

JSON = {"Content-Type": "application/json"}


class Clock:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self._tick()

    def _tick(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._tick)


@pytest.mark.parametrize(("weight", "most"), [(TURN_WEIGHT, 1), (TURN_WEIGHT // 4, 4), (1, 16)])
async def test_so_much_work_begins_in_a_turn_of_the_loop(weight: int, most: int) -> None:
    clock, turns, begun = Clock(), Turns(), list[int]()

    async def work() -> None:
        await turns.take(weight)
        begun.append(clock.turn)

    await asyncio.gather(*[work() for _ in range(40)])
    counts = [len(list(same)) for _, same in itertools.groupby(begun)]
    assert max(counts[1:], default=0) == most and begun == sorted(begun)


async def test_room_is_given_in_order_and_one_piece_is_never_too_heavy() -> None:
    room, log = Room(100), list[int]()

    async def work(number: int, weight: int) -> None:
        await room.take(weight)
        log.append(number)

    tasks = [asyncio.create_task(work(*each)) for each in enumerate([60, 30, 50, 5, 1000])]
    await asyncio.sleep(0.01)
    assert log == [0, 1]
    tasks[2].cancel()
    await asyncio.sleep(0.01)
    assert log == [0, 1, 3]
    for weight in (60, 30, 5):
        room.give(weight)
    await asyncio.sleep(0.01)
    assert log == [0, 1, 3, 4]


async def test_who_is_cancelled_as_it_is_let_in_takes_no_room() -> None:
    room = Room(10)
    await room.take(10)
    waiting = asyncio.create_task(room.take(10))
    await asyncio.sleep(0)
    room.give(10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(room.take(10), 5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_crowd_of_long_bodies_is_worked_on_one_in_a_turn(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    clock, parsed, parse = Clock(), list[int](), bodies._parse

    def noted(content: Any) -> Any:
        parsed.append(clock.turn)
        return parse(content)

    monkeypatch.setattr(bodies, "_parse", noted)
    said = [{"role": "user", "content": ""}] * 1500
    body: dict[str, Any] = {"messages": said, "max_tokens": 1}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": said}
    content = json.dumps(body).encode()
    assert len(content) < bodies.LARGE_BODY_BYTES
    await asyncio.gather(*[client.post(path, content=content, headers=JSON) for _ in range(8)])
    assert len(set(parsed)) == 8


def members(name: str) -> list[Any]:
    return [each for each in gc.get_objects() if type(each) is dict and name in each]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "unknown": [{"mark": 1}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi", "mark": 1}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "chat_template_kwargs": {"x": {"mark": 1}},
            },
        ),
        (
            "/v1/responses",
            {"model": MODEL, "input": [{"role": "user", "content": "Hi", "mark": 1}]},
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi", "mark": 1}]}),
        ("/generate", {"text": "Hi", "unknown": {"mark": 1}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_body_is_kept_while_its_answer_is_made(
    scripted: ScriptedEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    scripted.script.held = True
    limit = {"max_tokens": 2} if path == "/v1/messages" else {}
    content = json.dumps({**body, **limit, "stream": stream}).replace("mark", "mark-4711").encode()
    app = make_app(scripted)
    async with client_of(app) as client:
        asked = asyncio.create_task(client.post(path, content=content, headers=JSON))
        while not scripted.running and not asked.done():
            await asyncio.sleep(0.005)
        gc.collect()
        assert members("mark-4711") == []
        scripted.script.held = False
        answer = await asked
        assert answer.status_code == 200, answer.text


async def test_a_body_of_very_many_strings_is_refused(client: httpx.AsyncClient) -> None:
    content = b'{"prompt": "x", "unknown": [' + b",".join([b'"ab"'] * 300_000) + b"]}"
    answer = await client.post("/v1/completions", content=content, headers=JSON)
    assert error_of(answer, 400)["code"] == "body_too_complex"


async def test_a_text_full_of_quotes_is_one_string(client: httpx.AsyncClient) -> None:
    content = json.dumps({"prompt": '{"a": ["b"]}' * 60_000}).encode()
    answer = await client.post("/v1/completions", content=content, headers=JSON)
    assert error_of(answer, 400, "prompt")["code"] == "context_length_exceeded"


async def test_a_text_of_ids_is_bounded_by_its_length(
    client: httpx.AsyncClient, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = scripted.tokenizer.encode("Hello there", add_special_tokens=False)
    monkeypatch.setattr(tokenize, "MAX_TEXT_BYTES", 10 * len("Hello there"))
    assert (await client.post("/v1/detokenize", json={"tokens": ids * 10})).status_code == 200
    for tokens in (ids * 11, [ids] * 11):
        answer = await client.post("/v1/detokenize", json={"tokens": tokens})
        assert error_of(answer, 400, "tokens")["code"] == "text_too_long"
