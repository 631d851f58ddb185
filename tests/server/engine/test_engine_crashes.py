"""An engine process that ends unexpectedly: no request is lost, no token told twice, and the
request that is to blame is found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_clients import (
    POISON,
    POISONED_ENGINE,
    PROMPTS,
    assert_nothing_left,
    collect,
    config,
    params,
    request,
    start,
    tokens,
    until,
)

from piecework.runtime.core.generation import FinishReason
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.engine import crash_limit
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState, EngineUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(model: str) -> AsyncIterator[EngineClient]:
    """For tests that end it."""
    client = await start(model)
    yield client
    await client.stop()


@pytest.mark.slow
async def test_killed_engine_loses_no_request_and_repeats_no_token(
    own_engine: EngineClient, undisturbed: list[list[int]]
) -> None:
    """Greedy and seeded requests, running and queued ones, while their outputs are being
    streamed.
    """
    jobs = [
        asyncio.create_task(collect(own_engine, request(f"r{i}", p, params(i))))
        for i, p in enumerate(PROMPTS)
    ]
    await until(lambda: own_engine.stats.generation_tokens_total > 40)
    assert own_engine.engine_pid is not None
    os.kill(own_engine.engine_pid, signal.SIGKILL)
    await until(lambda: own_engine.state is EngineState.RESTARTING)
    results = await asyncio.gather(*jobs)
    assert [tokens(outputs) for outputs in results] == undisturbed
    assert all(outputs[-1].completion_tokens == 120 for outputs in results)
    whole = [own_engine.tokenizer.decode(ids) for ids in undisturbed]
    assert ["".join(output.text for output in outputs) for outputs in results] == whole
    assert own_engine.restarts == 1
    await assert_nothing_left(own_engine)


@pytest.mark.slow
async def test_too_many_crashes_in_a_minute_give_up(
    own_engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two here; the server's own number is in the test of how it ends."""
    monkeypatch.setattr(crash_limit, "CRASH_LIMIT", 2)
    job = asyncio.create_task(collect(own_engine, request("r", [1, 2, 3], params(1, 100_000))))
    for crash in range(crash_limit.CRASH_LIMIT):
        await until(
            lambda: own_engine.state is EngineState.READY and own_engine.engine_pid is not None
        )
        os.kill(own_engine.engine_pid or 0, signal.SIGKILL)
        await until(lambda crash=crash: own_engine.restarts > crash or own_engine.failed.is_set())
    await asyncio.wait_for(own_engine.failed.wait(), 10)
    assert own_engine.state is EngineState.FAILED and "2 times" in (own_engine.failure or "")
    assert (await job)[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineUnavailable):
        await collect(own_engine, request("late", [1], params(1)))


async def test_an_engine_that_is_never_ready_is_given_up_however_long_it_takes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_limit, "CRASH_WINDOW", 0.0)
    command = (sys.executable, "-c", "raise SystemExit(3)")
    client = EngineClient(config(model), load_tokenizer(model), log_level="error", command=command)
    await client.start()
    try:
        assert not await asyncio.wait_for(client.wait_ready(), 30)
        assert (
            client.failure
            == "the engine process ended 3 times before it was ready, last with exit code 3"
        )
    finally:
        await client.stop()


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "two ranks"]
)
async def test_a_request_that_kills_the_engine_is_found_and_the_others_go_on(
    model: str, tmp_path: Path, ranks: int, undisturbed: list[list[int]]
) -> None:
    """The others lose no token and repeat none."""
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED_ENGINE)
    client = EngineClient(
        config(model, tp_size=ranks),
        load_tokenizer(model),
        log_level="warning",
        command=(sys.executable, str(script)),
    )
    await client.start()
    try:
        assert await client.wait_ready()
        healthy = asyncio.create_task(
            collect(client, request("healthy", PROMPTS[1], params(1, 300)))
        )
        await until(lambda: client.stats.generation_tokens_total > 5)
        prompts = [[5, 6], [5, POISON], [7, 8]]
        jobs = [
            asyncio.create_task(collect(client, request(f"r{i}", prompt, params(1, 4))))
            for i, prompt in enumerate(prompts)
        ]
        first, poison, third = [(await job)[-1] for job in jobs]
        assert poison.finish_reason is FinishReason.ERROR and "twice" in (poison.error or "")
        assert first.completion_tokens == third.completion_tokens == 4
        said = tokens(await healthy)
        assert len(said) == 300 and said[:120] == undisturbed[1]
        assert client.restarts == 2 and client.state is EngineState.READY
    finally:
        await client.stop()
