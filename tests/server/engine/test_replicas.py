"""Several engines behind one interface: where requests go, and what becomes of them when one
ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_clients import (
    POISON,
    POISONED_ENGINE,
    PROMPTS,
    collect,
    config,
    params,
    request,
    tokens,
    until,
)

from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.images import ImageInput
from piecework.runtime.tokenizer.output_processor import RequestOutput, RequestState
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from piecework.server.config.server import ServerConfig
from piecework.server.engine.replicas import Replicas, split_config
from piecework.server.engine.state import EngineState, EngineUnavailable, QueueFull

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(model)


@pytest_asyncio.fixture(loop_scope="module")
async def idle(model: str, tokenizer: Tokenizer) -> AsyncIterator[Replicas]:
    """Two whose processes are never started; they are said to be ready."""
    found = Replicas(2, config(model), tokenizer, max_queued_requests=100)
    for each in found.replicas:
        each.state = EngineState.READY
    yield found
    await found.stop()


def add(
    replicas: Replicas, rid: str, prompt: list[int], key: str = "", tenant: str = ""
) -> tuple[int, list[RequestOutput]]:
    """Where a request goes, and what it will be told."""
    state, told = request(rid, prompt, params(1))(replicas.tokenizer), list[RequestOutput]()
    state.affinity, state.tenant = key, tenant
    state.deliver = told.append
    replicas.add_request(state)
    return holder(replicas, rid), told


def holder(replicas: Replicas, rid: str) -> int:
    (found,) = [each.number for each in replicas.replicas if rid in each._requests]
    return found


def long(number: int) -> list[int]:
    return [1 + number] * 200


async def test_requests_go_where_their_prefix_is_cached(idle: Replicas) -> None:
    (first, _), (second, _) = add(idle, "a", long(1)), add(idle, "b", long(2))
    assert {first, second} == {0, 1}
    for number in range(3):
        assert add(idle, f"a{number}", [*long(1), number])[0] == first
        assert add(idle, f"b{number}", [*long(2), number])[0] == second


async def test_requests_go_elsewhere_where_that_one_has_too_much_to_do(idle: Replicas) -> None:
    first, _ = add(idle, "a", long(1))
    went = [add(idle, f"a{number}", long(1))[0] for number in range(12)]
    assert went[:8] == [first] * 8 and 1 - first in went[8:]


async def test_a_short_common_beginning_does_not_gather_all_requests(idle: Replicas) -> None:
    went = [add(idle, f"r{n}", [5] * 64 + [6 + n] * 400)[0] for n in range(4)]
    assert went.count(0) == went.count(1) == 2


async def test_an_image_is_part_of_the_prefix(idle: Replicas) -> None:
    def went(rid: str, digest: bytes) -> int:
        state = request(rid, [7] * 200, params(1))(idle.tokenizer)
        state.images = [ImageInput(start=4, length=190, digest=digest, tensors={})]
        idle.add_request(state)
        return holder(idle, rid)

    first, second = went("a", b"one"), went("b", b"two")
    assert first != second
    for number in range(3):
        assert went(f"a{number}", b"one") == first and went(f"b{number}", b"two") == second


async def test_requests_with_one_key_meet(idle: Replicas) -> None:
    first, _ = add(idle, "a", long(1), "key")
    # The other replica has fewer requests.
    for number in range(4):
        assert add(idle, f"same{number}", long(20 + number), "key")[0] == first
    # The same words of another tenant are another key.
    went = {add(idle, f"t{n}", long(30 + n), "key", tenant=f"tenant{n}")[0] for n in range(4)}
    assert went == {1 - first}


async def test_a_key_does_not_overload_a_replica_and_moves_from_one_that_is_gone(
    idle: Replicas,
) -> None:
    first, _ = add(idle, "a", long(1), "key")
    went = [add(idle, f"k{number}", long(2 + number), "key")[0] for number in range(30)]
    assert abs(went.count(0) - went.count(1)) < 20
    idle.replicas[first].state = EngineState.RESTARTING
    assert add(idle, "b", long(50), "key")[0] == 1 - first
    idle.replicas[first].state = EngineState.READY
    idle.drop(list(idle.unfinished()))
    assert add(idle, "c", long(51), "key")[0] == 1 - first
    idle._by_key.clear()
    for number in range(10_100):
        idle._choose(keyed(idle, str(number)), idle.replicas)
    assert len(idle._by_key) == 10_000


def keyed(replicas: Replicas, key: str) -> RequestState:
    state = request("r", [1], params(1))(replicas.tokenizer)
    state.affinity = key
    return state


async def test_one_that_starts_again_gets_no_new_request(idle: Replicas) -> None:
    first, _ = add(idle, "a", long(1))
    idle.replicas[first].state = EngineState.RESTARTING
    assert add(idle, "b", long(1))[0] == 1 - first
    assert idle.state is EngineState.READY


async def test_room_is_that_of_all(idle: Replicas) -> None:
    idle._max_queued = 3
    for number in range(3):
        add(idle, f"r{number}", [1])
    with pytest.raises(QueueFull):
        add(idle, "more", [1])


async def test_what_began_goes_on_elsewhere_and_suspects_stay(idle: Replicas) -> None:
    (first, _), (same, _) = add(idle, "began", long(1)), add(idle, "suspect", long(1))
    assert first == same
    died = idle.replicas[first]
    died._requests["began"].delivered = True
    died._survive_crash(-9)
    assert holder(idle, "began") == 1 - first and holder(idle, "suspect") == first
    assert idle.restarts == 1 and len(died.prefixes) == 0


async def test_one_that_is_given_up_leaves_the_others(idle: Replicas) -> None:
    (first, told), (second, _) = add(idle, "a", long(1)), add(idle, "b", long(2))
    idle.replicas[first]._give_up("it broke")
    assert holder(idle, "a") == second and not told
    assert idle.state is EngineState.READY and not idle.failed.is_set()
    idle.replicas[second]._give_up("it broke")
    assert told[-1].finish_reason is FinishReason.ERROR
    assert idle.failed.is_set() and idle.state is EngineState.FAILED
    assert idle.failure == "it broke"
    with pytest.raises(EngineUnavailable, match="it broke"):
        add(idle, "late", [1])


async def test_one_that_the_user_must_mend_ends_all(idle: Replicas) -> None:
    lost = idle.replicas[1]
    lost.user_error, lost.failure = True, "too few GPUs"
    lost._give_up("too few GPUs")
    assert idle.failed.is_set() and idle.user_error
    assert not await asyncio.wait_for(idle.wait_ready(), 5)


async def test_a_request_that_cannot_be_sent_again_ends_alone(
    idle: Replicas, monkeypatch: Any
) -> None:
    (first, told), (_, _) = add(idle, "a", long(1)), add(idle, "b", long(2))

    def fail(self: RequestState) -> None:
        raise RuntimeError("it cannot be read")

    idle.replicas[first]._requests["a"].delivered = True
    monkeypatch.setattr(RequestState, "to_message", fail)
    idle.replicas[first]._survive_crash(-9)
    assert told[-1].finish_reason is FinishReason.ERROR
    assert idle.num_unfinished == 1


async def test_the_size_of_the_cache_is_split(model: str) -> None:
    first, second = split_config(config(model, max_total_tokens=1000, random_seed=7), 2)
    assert first.max_total_tokens == second.max_total_tokens == 500
    assert first.random_seed != second.random_seed
    assert (second.replica, second.replicas) == (1, 2)


async def test_a_cache_without_a_token_for_each_is_told_as_it_was_given(model: str) -> None:
    with pytest.raises(ValueError, match="--max-total-tokens 3 is shared by 4 replicas"):
        ServerConfig(engine=config(model, max_total_tokens=3), dp_size=4)


@pytest.mark.slow
async def test_a_killed_one_is_a_pause_and_the_text_is_that_of_one_engine(
    model: str, tokenizer: Tokenizer, undisturbed: list[list[int]]
) -> None:
    replicas = Replicas(2, config(model), tokenizer, log_level="error")
    await replicas.start()
    try:
        assert await asyncio.wait_for(replicas.wait_ready(), 60), replicas.failure
        assert replicas.info is not None and replicas.info.kv_tokens == 2048
        jobs = [
            asyncio.create_task(collect(replicas, request(f"r{i}", p, params(i))))  # type: ignore[arg-type]
            for i, p in enumerate(PROMPTS)
        ]
        first = replicas.replicas[0]
        await until(lambda: first.stats.generation_tokens_total > 20)
        os.kill(first.engine_pid or 0, signal.SIGKILL)
        await until(lambda: first.state is EngineState.RESTARTING)
        assert not first.num_unfinished
        assert [tokens(outputs) for outputs in await asyncio.gather(*jobs)] == undisturbed
        await until(lambda: first.state is EngineState.READY)
        assert replicas.restarts == 1 and await replicas.flush_cache() > 0
        assert await replicas.abort(None) == 0
    finally:
        await replicas.stop()


@pytest.mark.slow
async def test_a_request_that_kills_its_engine_is_found_and_kills_no_other(
    model: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (script := tmp_path / "poisoned.py").write_text(POISONED_ENGINE)
    replicas = Replicas(2, config(model), tokenizer, log_level="error")
    for each in replicas.replicas:
        each._command = (sys.executable, str(script))
    await replicas.start()
    try:
        assert await asyncio.wait_for(replicas.wait_ready(), 60), replicas.failure
        prompts = [[5, 6], [5, POISON], [7, 8], [9, 10]]
        jobs = [
            asyncio.create_task(collect(replicas, request(f"r{i}", prompt, params(1, 4))))  # type: ignore[arg-type]
            for i, prompt in enumerate(prompts)
        ]
        reasons = [(await job)[-1].finish_reason for job in jobs]
        assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, *[FinishReason.LENGTH] * 2]
        assert sorted(each.restarts for each in replicas.replicas) == [0, 2]
    finally:
        await replicas.stop()
