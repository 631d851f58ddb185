"""No body of up to the size limit keeps the event loop or takes memory out of proportion, and none
costs what is refused anyway.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import httpx
import psutil
import pytest
from http_fixtures import client_of, error_of, make_app, post, wait_for
from scripted_engine import CONTEXT_LENGTH, ScriptedEngine

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.tokenizer.output_processor import RequestState, TextOptions
from piecework.server.http import body as bodies
from piecework.server.http.body import MAX_BODY_BYTES

JSON = {"Content-Type": "application/json"}
# How long nothing else may wait, and how long a refusal may take: multiples of the time that the
# largest body takes to parse now. Without the bounds a body holds the event loop 60 times as long.
LONGEST_HOLD, LONGEST_REFUSAL = 20.0, 60.0
MOST_MEMORY = 300e6


def filled(before: str, item: str, after: str) -> bytes:
    """A body of almost the size limit: as many items as fit."""
    count = (MAX_BODY_BYTES - len(before) - len(after)) // (len(item.encode()) + 1)
    return (before + ",".join([item] * count) + after).encode()


HEAVY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "wrong_messages": ("/v1/chat/completions", partial(filled, '{"messages":[', "1", "]}")),
    "empty_messages": ("/v1/chat/completions", partial(filled, '{"messages":[', "{}", "]}")),
    "right_messages": (
        "/v1/chat/completions",
        partial(filled, '{"messages":[', '{"role":"user","content":""}', "]}"),
    ),
    "wrong_parts": (
        "/v1/chat/completions",
        partial(filled, '{"messages":[{"role":"user","content":[', "{}", "]}]}"),
    ),
    "stop_token_ids": (
        "/v1/completions",
        partial(filled, '{"prompt":"x","stop_token_ids":[', '"a"', "]}"),
    ),
    "right_stop_token_ids": (
        "/v1/completions",
        partial(filled, '{"prompt":"x","stop_token_ids":[', "5", "]}"),
    ),
    "stops": ("/v1/completions", partial(filled, '{"prompt":"x","stop":[', '"a"', "]}")),
    "prompts": ("/v1/completions", partial(filled, '{"prompt":[', '"a"', "]}")),
    "id_lists": ("/v1/completions", partial(filled, '{"prompt":[', "[5]", "]}")),
    "ids": ("/v1/completions", partial(filled, '{"prompt":[', "5", "]}")),
    "wrong_ids": ("/v1/completions", partial(filled, '{"prompt":[', "5", ',"a"]}')),
    "sampling_params": (
        "/generate",
        partial(filled, '{"text":"x","sampling_params":[', "{}", "]}"),
    ),
    "return_logprob": ("/generate", partial(filled, '{"text":"x","return_logprob":[', "1", "]}")),
    "rids": ("/generate", partial(filled, '{"text":"x","rid":[', '"a"', "]}")),
    "texts": ("/generate", partial(filled, '{"text":[', '"a"', "]}")),
    "detokenize_lists": ("/v1/detokenize", partial(filled, '{"tokens":[', "[]", "]}")),
    "tokenize_texts": ("/v1/tokenize", partial(filled, '{"prompt":[', '"a"', "]}")),
    "members": (
        "/v1/completions",
        partial(filled, '{"prompt":"x",', '"a":1', ',"max_tokens":"x"}'),
    ),
    "nested": ("/v1/completions", partial(filled, '{"prompt":"","x":[', "[" * 99 + "]" * 99, "]}")),
    "long_text": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "the quick brown fox " * 200_000}).encode(),
    ),
    "long_word": ("/generate", lambda: json.dumps({"text": "a" * 4_000_000}).encode()),
    "long_message": (
        "/v1/chat/completions",
        lambda: json.dumps({"messages": [{"role": "user", "content": "x " * 2_000_000}]}).encode(),
    ),
    "long_to_tokenize": ("/v1/tokenize", lambda: json.dumps({"prompt": "x " * 2_000_000}).encode()),
    "biases": (
        "/v1/completions",
        lambda: json.dumps(
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(300_000)}}
        ).encode(),
    ),
}


@cache
def heavy(name: str) -> tuple[str, bytes]:
    path, make = HEAVY[name]
    return path, make()


@pytest.fixture(autouse=True, scope="module")
def own_objects() -> None:
    """Collections look at what these tests make, not at what tests before them hold as well, which
    takes longer than most of them.
    """
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def watched() -> AsyncIterator[Callable[[], tuple[float, float]]]:
    """Yields what tells the longest time that the event loop was held, in seconds, and by how many
    bytes memory has grown at most.
    """
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    longest = most = 0.0

    async def watch() -> None:
        nonlocal longest, most
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - due)
            most = max(most, process.memory_info().rss - before)

    task = asyncio.create_task(watch())
    yield lambda: (longest, most)
    task.cancel()


def seconds_to_parse() -> float:
    began = time.perf_counter()
    json.loads(heavy("empty_messages")[1])
    return time.perf_counter() - began


@pytest.mark.parametrize("name", HEAVY)
async def test_a_heavy_body_is_refused_before_it_costs(
    client: httpx.AsyncClient, name: str
) -> None:
    path, content = heavy(name)
    assert len(content) <= MAX_BODY_BYTES
    unit = seconds_to_parse()
    async with watched() as cost:
        began = time.perf_counter()
        error_of_any(await client.post(path, content=content, headers=JSON))
        took = time.perf_counter() - began
        held, memory = cost()
    unit = max(unit, seconds_to_parse())
    assert held < LONGEST_HOLD * unit
    assert took < LONGEST_REFUSAL * unit
    assert memory < MOST_MEMORY


def error_of_any(answer: httpx.Response) -> None:
    error_of(answer, 400, answer.json()["error"]["param"])


async def test_many_heavy_bodies_at_once_do_not_add_up(client: httpx.AsyncClient) -> None:
    """Each is parsed in a turn of its own, and whoever asks for something small is answered between
    two of them.
    """
    path, content = heavy("empty_messages")
    async with watched() as cost:
        answers = await asyncio.gather(
            *[client.post(path, content=content, headers=JSON) for _ in range(8)]
        )
        held, _ = cost()
    assert {answer.status_code for answer in answers} == {400}
    assert held < LONGEST_HOLD * seconds_to_parse()


async def test_large_bodies_are_bounded_together_and_small_ones_are_still_taken(
    client: httpx.AsyncClient, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_LARGE_BYTES", 5 * 2**17)
    scripted.script.held = True
    large = json.dumps({"prompt": "x", "user": "y" * 2**18}).encode()
    waiting = [
        asyncio.create_task(client.post("/v1/completions", content=large, headers=JSON))
        for _ in range(2)
    ]
    while len(scripted.running) < 2:
        await asyncio.sleep(0.005)
    refused = await client.post("/v1/completions", content=large, headers=JSON)
    assert error_of(refused, 503)["code"] == "bodies_full"
    assert refused.headers["Retry-After"] == "1"
    small = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
    while len(scripted.running) < 3:
        await asyncio.sleep(0.005)
    scripted.script.held = False
    assert {(await task).status_code for task in [*waiting, small]} == {200}
    assert (await client.post("/v1/completions", content=large, headers=JSON)).status_code == 200, (
        "what ended takes room still"
    )


async def test_what_stands_inside_of_strings_is_no_structure(client: httpx.AsyncClient) -> None:
    code = '{"a": [1, 2, "\\\\\\" {"], "b": {}} ' * 20_000
    for content in (
        json.dumps({"tokens": [5], "user": code}),
        json.dumps({"tokens": [5], code: "["}),
    ):
        assert content.count("{") > bodies.MAX_STRUCTURE / 3
        assert (
            await client.post("/v1/detokenize", content=content, headers=JSON)
        ).status_code == 200
    deep = await client.post("/v1/detokenize", content=heavy("nested")[1], headers=JSON)
    assert error_of(deep, 400)["code"] == "body_too_complex"


# Stop strings


def test_a_sequence_costs_the_same_before_it_runs_whatever_its_stop_strings(
    scripted: ScriptedEngine,
) -> None:
    def seconds(stops: list[str]) -> float:
        text = TextOptions(stop=stops)
        # Other programs do not count.
        began = time.process_time()
        for _ in range(128):
            RequestState("r", [5], SamplingParams(), scripted.tokenizer, text=text)
        return time.process_time() - began

    long = [f"{number:03}" + "ab" * 62 for number in range(64)]
    assert min(seconds(long) for _ in range(5)) < 20 * min(seconds([]) for _ in range(5))


async def test_stop_strings_are_bounded_together(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/completions",
        json={"prompt": "x", "n": 128, "stop": [f"{i:02}" + "a" * 1022 for i in range(64)]},
    )
    assert "8192 characters" in error_of(answer, 400, "stop")["message"]


# Tokenising


@pytest.fixture
def encoded(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each text that is tokenised."""
    lengths: list[int] = []
    encode = scripted.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(scripted.tokenizer, "encode", counted)
    return lengths


LONG = "The quick brown fox. " * 150_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/generate", {"text": LONG}, "text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
    ids=["completion", "one_of_two", "generate", "chat"],
)
async def test_a_prompt_that_cannot_fit_is_refused_from_its_beginning(
    client: httpx.AsyncClient, encoded: list[int], path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(await client.post(path, json=body), 400, param)
    assert error["code"] == "context_length_exceeded" and str(CONTEXT_LENGTH) in error["message"]
    assert sum(encoded) < len(LONG) / 50


async def test_a_long_text_that_fits_is_tokenised_whole(scripted: ScriptedEngine) -> None:
    """Many characters, few tokens: counting slices must not refuse it, nor change its tokens."""
    text = (
        "<|im_start|>" * (CONTEXT_LENGTH - 20) * 12
    )  # more than the inline bound only as characters
    text = text[: 12 * (CONTEXT_LENGTH - 20)]
    async with client_of(make_app(scripted)) as client:
        answer = await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert scripted.requests[0].prompt_ids == scripted.tokenizer.encode(text)


async def test_the_queue_is_checked_before_anything_is_tokenised(
    client: httpx.AsyncClient, scripted: ScriptedEngine, encoded: list[int]
) -> None:
    scripted.script.room = 1
    for path, body in {
        "/v1/completions": {"prompt": ["a", "b"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2},
        "/generate": {"text": ["a", "b"]},
    }.items():
        assert error_of(await client.post(path, json=body), 503)["code"] == "queue_full"
    assert encoded == []


async def test_what_the_queue_can_never_hold_is_no_matter_of_trying_again(
    client: httpx.AsyncClient, encoded: list[int]
) -> None:
    error = error_of(
        await client.post("/v1/completions", json={"prompt": ["a"] * 500, "n": 3}), 400, "prompt"
    )
    assert error["code"] == "too_many_sequences" and encoded == []


def test_what_a_gone_client_would_have_had_tokenised_is_dropped(
    url: str, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, texts, go_on = scripted.tokenizer.encode, list[str](), threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        texts.append(text)
        go_on.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(scripted.tokenizer, "encode", slow)
    gone = [post(url, "/v1/completions", {"prompt": ["b" * 9000] * 5}) for _ in range(3)]
    wait_for(lambda: len(texts) >= 1)
    for connection in gone:
        connection.close()
    time.sleep(0.3)
    begun = len(texts)
    stays = post(url, "/v1/tokenize", {"prompt": "c" * 9000})
    go_on.set()
    assert stays.recv(20).startswith(b"HTTP/1.1 200")
    assert [text[0] for text in texts[begun:]] == ["c"]
    assert httpx.get(f"{url}/health").status_code == 200


async def test_log_probabilities_of_prompts_are_bounded(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    body = {"prompt": "word " * 40, "echo": True, "logprobs": 100, "max_tokens": 1, "n": 128}
    assert (
        error_of(await client.post("/v1/completions", json=body), 400, "logprobs")["code"]
        == "too_many_logprobs"
    )
    native = {
        "text": "word " * 40,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 100,
        "sampling_params": {"n": 128},
    }
    assert (
        error_of(await client.post("/generate", json=native), 400, "top_logprobs_num")["code"]
        == "too_many_logprobs"
    )
    assert scripted.requests == []
