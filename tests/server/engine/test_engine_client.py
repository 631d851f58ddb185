"""The engine client with a real engine process: crashes, disconnects, overload and stops lose
nothing and leak nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_clients import (
    PROMPTS,
    assert_nothing_left,
    collect,
    config,
    outputs_of,
    params,
    request,
    start,
    tokens,
    until,
)
from tiny_models import EOS_ID

from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.process.slices import SLICE_NANOSECONDS, slice_nanoseconds
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineUnavailable, QueueFull

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: str) -> AsyncIterator[EngineClient]:
    """One for all tests that leave it as it was."""
    client = await start(model)
    yield client
    await client.stop()


async def test_the_tokenizers_own_end_token_reaches_the_engine(engine: EngineClient) -> None:
    likely = SamplingParams(temperature=0.0, max_new_tokens=9, logit_bias={EOS_ID: 100.0})
    (*_, last) = await collect(engine, request("r", [5, 6], likely))
    assert (last.finish_reason, last.matched_stop, last.completion_tokens) == (
        FinishReason.STOP,
        EOS_ID,
        1,
    )


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(model: str) -> AsyncIterator[EngineClient]:
    """For tests that end it."""
    client = await start(model)
    yield client
    await client.stop()


async def test_outputs_are_those_of_the_scheduler_in_process(
    engine: EngineClient, undisturbed: list[list[int]]
) -> None:
    results = await asyncio.gather(
        *(collect(engine, request(f"r{i}", p, params(i))) for i, p in enumerate(PROMPTS))
    )
    assert [tokens(outputs) for outputs in results] == undisturbed
    await assert_nothing_left(engine)


@pytest.mark.skipif(slice_nanoseconds() == 0, reason="Linux tells slices from 6.12 on")
async def test_the_engine_computes_with_short_slices(engine: EngineClient) -> None:
    """Its main thread starts those that compute with it, which inherit them."""
    assert slice_nanoseconds(engine.engine_pid or 0) == SLICE_NANOSECONDS


async def test_a_consumer_that_leaves_frees_its_request(engine: EngineClient) -> None:
    before = engine.stats.generation_tokens_total
    async with aclosing(outputs_of(engine, request("gone", [1, 2, 3], params(1, 3000)))) as outputs:
        async for _ in outputs:
            break
    await assert_nothing_left(engine)
    assert engine.stats.generation_tokens_total - before < 2500


async def test_a_cancelled_consumer_frees_its_request_while_queued(engine: EngineClient) -> None:
    jobs = [
        asyncio.create_task(collect(engine, request(f"r{i}", [1, 2], params(1, 3000))))
        for i in range(12)
    ]
    await until(lambda: engine.stats.queued_requests > 0)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    await assert_nothing_left(engine)


async def test_abort_by_id_ends_the_parts_of_a_request_and_no_stranger(
    engine: EngineClient,
) -> None:
    wanted = [
        request("a-0", [1, 2], params(1, 3000), "a"),
        request("a-1", [1, 2], params(1, 3000), "a"),
    ]
    strangers = [request(rid, [1, 2], params(1, 3000)) for rid in ("ab-0", "a-2")]
    jobs = [asyncio.create_task(collect(engine, job)) for job in wanted + strangers]
    await until(lambda: engine.stats.running_requests == 4)
    assert await engine.abort("a") == 2
    ended = await asyncio.gather(*jobs[:2])
    assert [outputs[-1].finish_reason for outputs in ended] == [FinishReason.ABORT] * 2
    assert not any(job.done() for job in jobs[2:])
    assert await engine.abort("a-2") == 1
    assert await engine.abort(None) == 1
    await asyncio.gather(*jobs[2:])
    await assert_nothing_left(engine)


async def test_a_stop_string_ends_the_request_in_the_engine_too(engine: EngineClient) -> None:
    greedy = SamplingParams(max_new_tokens=3000, temperature=0.0, ignore_eos=True)
    text = "".join(
        output.text for output in await collect(engine, request("a", [4, 5, 6], params(1, 60)))
    )
    stop = text[20:24]
    outputs = await collect(engine, request("b", [4, 5, 6], greedy, stop=[stop]))
    assert "".join(output.text for output in outputs) == text[: text.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].matched_stop) == (FinishReason.STOP, stop)
    await assert_nothing_left(engine)


@pytest.mark.slow
async def test_pieces_come_in_while_requests_are_served(
    model: str, undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold start compiles beside the serving: before, while and after the pieces come in, the
    tokens are the same.
    """
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    graphs = {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "piecewise_cuda_graph_tokens": "1,2,4,8",
    }
    client = EngineClient(config(model, **graphs), load_tokenizer(model), log_level="warning")
    await client.start()
    try:
        assert await client.wait_ready(), client.failure
        ends = time.monotonic() + 120
        for attempt in itertools.count():
            jobs = [
                collect(client, request(f"{attempt}-{i}", p, params(i)))
                for i, p in enumerate(PROMPTS)
            ]
            assert [tokens(outputs) for outputs in await asyncio.gather(*jobs)] == undisturbed
            if attempt == 0:
                assert client.stats.piecewise_steps_total < client.stats.steps_total
            if client.stats.graph_replays_total > 50:
                break
            assert time.monotonic() < ends, f"the graphs did not come in: {client.stats}"
            # The compiling process, of a low priority, has its turn.
            await asyncio.sleep(0.5)
    finally:
        await client.stop()


async def test_more_requests_than_places_are_refused(engine: EngineClient) -> None:
    places = 4 + 64  # that run, and that wait: see `engine_clients.start`
    jobs = [
        asyncio.create_task(collect(engine, request(f"r{i}", [1, 2], params(1, 4))))
        for i in range(places)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await collect(engine, request("too many", [1], params(1)))
    assert all(len(tokens(outputs)) == 4 for outputs in await asyncio.gather(*jobs))
    await collect(engine, request("room again", [1], params(1, 1)))


async def test_flushing_frees_cached_prefixes(engine: EngineClient) -> None:
    await collect(engine, request("r", list(range(1, 65)), params(1, 1)))
    assert await engine.flush_cache() >= 64
    outputs = await collect(engine, request("again", list(range(1, 65)), params(1, 1)))
    assert outputs[-1].cached_tokens == 0


async def test_an_engine_that_is_asked_something_as_it_is_stopped_ends_in_order(
    own_engine: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers before it ends, when nobody waits for that any more."""
    flush = asyncio.create_task(own_engine.flush_cache())
    await asyncio.sleep(0)
    await own_engine.stop()
    with pytest.raises(EngineUnavailable, match="stopped"):
        await flush
    assert not caplog.records


@pytest.mark.slow
async def test_a_setting_that_cannot_work_is_the_users_to_mend(model: str) -> None:
    client = EngineClient(config(model, max_total_tokens=10**12), load_tokenizer(model))
    await client.start()
    assert not await client.wait_ready()
    assert client.user_error and "--max-total-tokens" in (client.failure or "")
    await client.stop()


@pytest.mark.slow
async def test_stopping_while_it_loads_ends_the_process(model: str) -> None:
    client = EngineClient(config(model), load_tokenizer(model))
    await client.start()
    await until(lambda: client.engine_pid is not None)
    pid = client.engine_pid
    await client.stop()
    assert not psutil.pid_exists(pid or 0)


async def test_the_engine_ends_with_the_process_that_started_it(model: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from piecework.runtime.config.engine import EngineConfig\n"
        "from piecework.runtime.tokenizer.tokenizer import load_tokenizer\n"
        "from piecework.server.engine.client import EngineClient\n"
        "async def main():\n"
        f"    config = EngineConfig(model_path={model!r}, max_total_tokens=512, "
        "disable_cuda_graph=True)\n"
        f"    client = EngineClient(config, load_tokenizer({model!r}))\n"
        "    await client.start()\n"
        "    await client.wait_ready()\n"
        "    print(client.engine_pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(timeout=10)


async def test_drain_finishes_what_it_can_and_cuts_off_the_rest(own_engine: EngineClient) -> None:
    engine = own_engine
    before = engine.stats.generation_tokens_total
    short = asyncio.create_task(collect(engine, request("short", [1, 2], params(1, 5))))
    long = asyncio.create_task(collect(engine, request("long", [1, 2], params(1, 3900))))
    await until(lambda: engine.stats.generation_tokens_total > before)
    await engine.drain(0.5)
    assert (await short)[-1].finish_reason is FinishReason.LENGTH
    assert (await long)[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineUnavailable):
        await collect(engine, request("late", [1], params(1)))
