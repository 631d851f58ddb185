"""An engine that serves before its kernels are compiled: another process compiles them and takes
over, no request is lost or changed, and a compiler that fails costs only speed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_clients import (
    PROMPTS,
    assert_nothing_left,
    collect,
    config,
    params,
    request,
    tokens,
    until,
)
from native_variants import needs_kernels
from waiting_compiler import use_waiting_compiler

from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_kernels]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compiler that waits."""
    use_waiting_compiler(tmp_path, monkeypatch)
    monkeypatch.delenv("PIECEWORK_KERNELS")
    return tmp_path


@pytest_asyncio.fixture(loop_scope="module")
async def engine(model: str, compiler: Path) -> AsyncIterator[EngineClient]:
    """Serves already, without kernels."""
    client = EngineClient(config(model), load_tokenizer(model), log_level="warning")
    await client.start()
    assert await client.wait_ready(), client.failure
    assert client.info is not None and client.info.attention_backend == "torch"
    assert client.progress is not None and "without kernels" in client.progress.phase
    yield client
    await client.stop()


async def test_requests_go_on_in_the_process_that_has_the_kernels(
    engine: EngineClient, compiler: Path, undisturbed: list[list[int]]
) -> None:
    """Greedy and seeded requests, running and queued ones. The first process is suspended, so that
    none of them ends in it.
    """
    first = engine.engine_pid or 0
    jobs = [
        asyncio.create_task(collect(engine, request(f"r{i}", prompt, params(i))))
        for i, prompt in enumerate(PROMPTS)
    ]
    await until(lambda: engine.stats.generation_tokens_total > 20)
    os.kill(first, signal.SIGSTOP)
    (compiler / "go").touch()
    results = await asyncio.gather(*jobs)
    assert [tokens(outputs) for outputs in results] == undisturbed
    assert engine.engine_pid not in (None, first) and engine.info is not None
    assert engine.info.attention_backend == "native"
    assert (engine.state, engine.restarts, engine.progress) == (EngineState.READY, 0, None)
    await assert_nothing_left(engine)
    await until(lambda: not psutil.pid_exists(first))


@pytest.mark.slow
async def test_a_compiler_that_fails_is_reported_once_and_the_engine_goes_on(
    engine: EngineClient, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine.engine_pid
    (compiler / "fail").touch()
    with caplog.at_level(logging.WARNING):
        (compiler / "go").touch()
        await until(lambda: engine._successor is not None and engine._successor.doing is None)
    (line,) = [each.message for each in caplog.records if "kernels" in each.message]
    assert "cannot be compiled" in line
    outputs = await collect(engine, request("r", [1, 2, 3], params(1, 5)))
    assert len(tokens(outputs)) == 5 and engine.engine_pid == first


@pytest.mark.slow
async def test_an_engine_that_crashes_meanwhile_is_restarted_and_replaced(
    engine: EngineClient, compiler: Path, undisturbed: list[list[int]]
) -> None:
    job = asyncio.create_task(collect(engine, request("r0", PROMPTS[0], params(0))))
    await until(lambda: engine.stats.generation_tokens_total > 5)
    os.kill(engine.engine_pid or 0, signal.SIGKILL)
    await until(lambda: engine.restarts == 1 and engine.state is EngineState.READY)
    (compiler / "go").touch()
    assert tokens(await job) == undisturbed[0]
    await until(lambda: engine.info is not None and engine.info.attention_backend == "native")


@pytest.mark.slow
async def test_a_stop_ends_both_processes(engine: EngineClient) -> None:
    await until(lambda: engine._successor is not None)
    await engine.stop()
    assert not psutil.Process().children(recursive=True)
