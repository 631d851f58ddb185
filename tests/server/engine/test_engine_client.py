"""The engine client with a real engine process: crashes, disconnects, overload and stops lose
nothing and leak nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tiny_models import EOS_ID, make_tiny_model

from piecework.runtime.config import EngineConfig
from piecework.runtime.engine.messages import FinishReason
from piecework.runtime.llm import LLM
from piecework.runtime.sampling.params import SamplingParams
from piecework.runtime.tokenizer.output_processor import (
    RequestOutput,
    RequestState,
    TextOptions,
)
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from piecework.server.engine import crash_limit
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState, EngineUnavailable, QueueFull

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[1 + (7 * i + j) % 300 for j in range(5 + 3 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


def config(model: str, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "num_threads": 1,
        "max_running_requests": 4,
    }
    # No process that compiles beside every engine.
    return EngineConfig(model_path=model, **{"piecewise_cuda_graph": False, **settings, **changes})  # type: ignore[arg-type]


async def start(model: str) -> EngineClient:
    client = EngineClient(
        config(model), load_tokenizer(model), max_queued_requests=64, log_level="warning"
    )
    await client.start()
    assert await client.wait_ready(), client.failure
    return client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: str) -> AsyncIterator[EngineClient]:
    """One for all tests that leave it as it was."""
    client = await start(model)
    yield client
    await client.stop()


async def test_the_tokenizers_own_end_token_reaches_the_engine(tmp_path: Path) -> None:
    client = await start(str(make_tiny_model(tmp_path, eos_token_id=None)))
    try:
        likely = SamplingParams(temperature=0.0, max_new_tokens=9, logit_bias={EOS_ID: 100.0})
        (*_, last) = await collect(client, request("r", [5, 6], likely))
        assert (last.finish_reason, last.matched_stop, last.completion_tokens) == (
            FinishReason.STOP,
            EOS_ID,
            1,
        )
    finally:
        await client.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(model: str) -> AsyncIterator[EngineClient]:
    """For tests that end it."""
    client = await start(model)
    yield client
    await client.stop()


def params(i: int, count: int = 120) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=count, ignore_eos=True, temperature=0.0 if i % 2 else 0.9, seed=i
    )


def request(
    rid: str, prompt: list[int], sampling: SamplingParams, *belongs_to: str, **text: object
) -> Callable[[Tokenizer], RequestState]:
    options = TextOptions(**text)  # type: ignore[arg-type]
    return lambda tokenizer: RequestState(
        rid, prompt, sampling, tokenizer, text=options, belongs_to=frozenset(belongs_to)
    )


async def outputs_of(
    client: EngineClient, wanted: Callable[[Tokenizer], RequestState]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one request until its end; closing it early drops the request."""
    state, queue = wanted(client.tokenizer), asyncio.Queue[RequestOutput]()
    state.deliver = queue.put_nowait
    client.add_request(state)
    try:
        while True:
            output = await queue.get()
            yield output
            if output.finish_reason is not None:
                return
    finally:
        client.drop([state])


async def collect(
    client: EngineClient, wanted: Callable[[Tokenizer], RequestState]
) -> list[RequestOutput]:
    return [output async for output in outputs_of(client, wanted)]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def until(condition: object, seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not come true in time")


async def assert_nothing_left(client: EngineClient) -> None:
    """One more request brings fresh figures; then nothing may be running, waiting or held."""
    await collect(client, request("last", [1, 2, 3], params(1, 1)))
    await until(lambda: client.stats.running_requests == client.stats.queued_requests == 0)
    assert client.stats.kv_tokens_used == 0


@pytest.fixture(scope="module")
def undisturbed(model: str) -> list[list[int]]:
    """What the same requests give in one process, without a crash."""
    llm = LLM(model, dtype="float32", max_total_tokens=4096, num_threads=1)
    return [
        done.token_ids for done in llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    ]


async def test_outputs_are_those_of_the_scheduler_in_process(
    engine: EngineClient, undisturbed: list[list[int]]
) -> None:
    results = await asyncio.gather(
        *(collect(engine, request(f"r{i}", p, params(i))) for i, p in enumerate(PROMPTS))
    )
    assert [tokens(outputs) for outputs in results] == undisturbed
    await assert_nothing_left(engine)


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


async def test_three_crashes_in_a_minute_give_up(own_engine: EngineClient) -> None:
    job = asyncio.create_task(collect(own_engine, request("r", [1, 2, 3], params(1, 100_000))))
    for crash in range(crash_limit.CRASH_LIMIT):
        await until(
            lambda: own_engine.state is EngineState.READY and own_engine.engine_pid is not None
        )
        os.kill(own_engine.engine_pid or 0, signal.SIGKILL)
        await until(lambda crash=crash: own_engine.restarts > crash or own_engine.failed.is_set())
    await asyncio.wait_for(own_engine.failed.wait(), 10)
    assert own_engine.state is EngineState.FAILED and "3 times" in (own_engine.failure or "")
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


POISON = 500
POISONED_ENGINE = f"""
import os, sys
from piecework.runtime.engine import process, text_process
from piecework.runtime.engine.core import EngineCore

plain_step = EngineCore.step

def step(self):
    if any({POISON} in request.tokens for request in self._scheduler.waiting):
        os._exit(7)
    return plain_step(self)

EngineCore.step = step
sys.exit(process.run_engine(lambda: text_process.build))
"""


async def test_a_request_that_kills_the_engine_is_found_and_the_others_go_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED_ENGINE)
    client = EngineClient(
        config(model),
        load_tokenizer(model),
        log_level="warning",
        command=(sys.executable, str(script)),
    )
    await client.start()
    try:
        assert await client.wait_ready()
        healthy = asyncio.create_task(collect(client, request("healthy", [1, 2], params(1, 1000))))
        await until(lambda: client.stats.generation_tokens_total > 5)
        prompts = [[5, 6], [5, POISON], [7, 8]]
        jobs = [
            asyncio.create_task(collect(client, request(f"r{i}", prompt, params(1, 4))))
            for i, prompt in enumerate(prompts)
        ]
        first, poison, third = [(await job)[-1] for job in jobs]
        assert poison.finish_reason is FinishReason.ERROR and "twice" in (poison.error or "")
        assert first.completion_tokens == third.completion_tokens == 4
        assert len(tokens(await healthy)) == 1000
        assert client.restarts == 2 and client.state is EngineState.READY
    finally:
        await client.stop()


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
    finally:
        await client.stop()


async def test_more_requests_than_places_are_refused(model: str) -> None:
    client = EngineClient(
        config(model, max_running_requests=1),
        load_tokenizer(model),
        max_queued_requests=2,
        log_level="warning",
    )
    await client.start()
    try:
        assert await client.wait_ready()
        jobs = [
            asyncio.create_task(collect(client, request(f"r{i}", [1, 2], params(1, 300))))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await collect(client, request("too many", [1], params(1)))
        assert all(len(tokens(outputs)) == 300 for outputs in await asyncio.gather(*jobs))
        await collect(client, request("room again", [1], params(1, 1)))
    finally:
        await client.stop()


async def test_flushing_frees_cached_prefixes(engine: EngineClient) -> None:
    await collect(engine, request("r", list(range(1, 65)), params(1, 1)))
    assert await engine.flush_cache() >= 64
    outputs = await collect(engine, request("again", list(range(1, 65)), params(1, 1)))
    assert outputs[-1].cached_tokens == 0


async def test_drain_finishes_what_it_can_and_cuts_off_the_rest(own_engine: EngineClient) -> None:
    short = asyncio.create_task(collect(own_engine, request("short", [1, 2], params(1, 5))))
    long = asyncio.create_task(collect(own_engine, request("long", [1, 2], params(1, 3900))))
    await until(lambda: own_engine.stats.generation_tokens_total > 0)
    await own_engine.drain(0.5)
    assert (await short)[-1].finish_reason is FinishReason.LENGTH
    assert (await long)[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineUnavailable):
        await collect(own_engine, request("late", [1], params(1)))


async def test_a_setting_that_cannot_work_is_the_users_to_mend(model: str) -> None:
    client = EngineClient(config(model, max_total_tokens=10**12), load_tokenizer(model))
    await client.start()
    assert not await client.wait_ready()
    assert client.user_error and "--max-total-tokens" in (client.failure or "")
    await client.stop()


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
        "from piecework.runtime.config import EngineConfig\n"
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
