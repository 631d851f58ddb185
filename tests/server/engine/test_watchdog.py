"""An engine process that hangs is found, told, ended and started again, and nothing is lost; one
that is slow is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from diffusion_pipelines import Folder
from http_fixtures import client_of, error_of, make_app
from tiny_models import make_tiny_model

from piecework.cli.core.flags import ServerConfig
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.messages import EngineAlive
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.tokenizer.tokenizer import load_tokenizer
from piecework.server.config.images import ImageServerConfig
from piecework.server.engine import watchdog as watchdog_module
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState
from piecework.server.engine.watchdog import Watchdog
from piecework.server.image_service import create_image_app
from piecework.server.images.client import ImageClient

TIMEOUT = 4.0
BODY = {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0}


@contextlib.asynccontextmanager
async def running(
    model: str, timeout: float = TIMEOUT, **settings: Any
) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        model_path=model,
        dtype="float32",
        max_total_tokens=4096,
        num_threads=1,
        max_running_requests=8,
        disable_cuda_graph=True,
        # A tiny model repeats itself, and its guesses end a request before it can be stopped.
        speculative_algorithm="none",
    )
    client = EngineClient(
        config, load_tokenizer(model), log_level="warning", watchdog_timeout=timeout, **settings
    )
    await client.start()
    try:
        assert await client.wait_ready(), client.failure
        yield client
    finally:
        await client.stop()


def script(folder: Path, fault: str) -> tuple[str, ...]:
    """The command of an engine process with this in it."""
    file = folder / "engine.py"
    file.write_text(
        "import os, signal, sys, time\nfrom piecework.runtime.engine import loop, process, text\n"
        f"{fault}\n{_RUN}"
    )
    return (sys.executable, str(file))


_RUN = "sys.exit(process.run_engine(lambda: text))\n"


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def stop(engine: EngineClient | ImageClient) -> int:
    pid = engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_a_stopped_engine_is_not_healthy_then_killed_and_no_token_is_lost(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**BODY, "max_tokens": 300}
    async with running(model) as engine, client_of(make_app(engine)) as client:  # type: ignore[arg-type]
        expected = (await client.post("/v1/completions", json=body)).json()["choices"]
        jobs = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        before = engine.stats.generation_tokens_total
        await until(lambda: engine.stats.generation_tokens_total > before + 20)
        pid = stop(engine)
        await until(lambda: engine.state is EngineState.UNRESPONSIVE)
        health = await client.get("/health")
        assert (
            health.status_code == 503 and "unresponsive" in health.text and psutil.pid_exists(pid)
        )
        assert "piecework:engine_silence_seconds" in (await client.get("/metrics")).text
        assert [(await job).json()["choices"] for job in jobs] == [expected] * 3
        assert (engine.restarts, engine.hangs) == (1, 1) and not psutil.pid_exists(pid)
        assert (
            'num_watchdog_restarts_total{model_name="toy"} 1.0'
            in (await client.get("/metrics")).text
        )
    (line,) = [record.getMessage() for record in caplog.records if "hangs" in record.getMessage()]
    assert "computing a step" in line and "--watchdog-timeout" in line


@pytest.mark.slow
async def test_an_engine_that_is_heard_again_in_time_goes_on(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is stopped before its first word after the start.
    monkeypatch.setattr(watchdog_module, "_BUILD_PATIENCE", 1)
    async with running(model, timeout=12.0) as engine:
        pid = stop(engine)
        await until(lambda: engine.state is EngineState.UNRESPONSIVE)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: engine.state is EngineState.READY)
        assert (engine.engine_pid, engine.restarts) == (pid, 0)


@pytest.mark.slow
async def test_an_idle_engine_is_heard_for_longer_than_the_timeout(model: str) -> None:
    async with running(model, timeout=3.0) as engine:
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            assert engine.silence < 3.0
            await asyncio.sleep(0.05)
        assert engine.hangs == 0


SLOW_LAYERS = """
from piecework.runtime.core import forward_context
from piecework.runtime.layers import attention

plain = attention.layer_begins

def slow():
    time.sleep(1.1)
    plain()

attention.layer_begins = slow
"""


@pytest.mark.slow
async def test_a_step_longer_than_the_timeout_is_no_hang_where_layer_follows_layer(
    tmp_path: Path,
) -> None:
    deep = str(make_tiny_model(tmp_path / "deep", "llama", num_hidden_layers=6))
    async with (
        running(deep, timeout=3.0, command=script(tmp_path, SLOW_LAYERS)) as engine,
        client_of(make_app(engine)) as client,
    ):  # type: ignore[arg-type]
        began = time.monotonic()
        answer = await client.post("/v1/completions", json={**BODY, "max_tokens": 1})
        assert answer.status_code == 200 and time.monotonic() - began > 6
        assert engine.hangs == 0


HANGING_STEP = """
from piecework.runtime.engine.core import EngineCore

plain_step = EngineCore.step

def stuck():
    while True:
        time.sleep(0.1)

def step(self):
    if any(400 in request.tokens for request in self._scheduler.waiting):
        stuck()
    return plain_step(self)

EngineCore.step = step
"""


@pytest.mark.slow
async def test_a_request_that_hangs_the_engine_again_and_again_is_answered(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the place where it hangs is printed."""
    async with (
        running(model, command=script(tmp_path, HANGING_STEP)) as engine,
        client_of(make_app(engine)) as client,
    ):  # type: ignore[arg-type]
        bad, good = await asyncio.gather(
            *(
                client.post("/v1/completions", json={**BODY, "prompt": prompt, "max_tokens": 4})
                for prompt in ([400], [401])
            )
        )
        assert "hung again" in error_of(bad, 500)["message"]
        assert good.status_code == 200
        assert engine.state is EngineState.READY
    assert " in stuck" in capfd.readouterr().err


@pytest.mark.slow
async def test_a_process_that_is_stopped_while_it_starts_is_started_again(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "_BUILD_PATIENCE", 1)
    client = EngineClient(
        EngineConfig(model_path=model, max_total_tokens=512),
        load_tokenizer(model),
        watchdog_timeout=TIMEOUT,
    )
    await client.start()
    try:
        await until(lambda: client.engine_pid is not None)
        stop(client)
        assert await asyncio.wait_for(client.wait_ready(), 60)
        assert client.hangs == 1
    finally:
        await client.stop()


@pytest.mark.slow
async def test_an_engine_that_always_hangs_is_given_up(model: str, tmp_path: Path) -> None:
    """However long the watchdog waits each time."""
    fault = "loop.Heartbeat.wait = lambda *_: time.sleep(600)"
    config = EngineConfig(
        model_path=model, max_total_tokens=512, num_threads=1, disable_cuda_graph=True
    )
    client = EngineClient(
        config,
        load_tokenizer(model),
        log_level="error",
        watchdog_timeout=3.0,
        command=script(tmp_path, fault),
    )
    await client.start()
    try:
        await asyncio.wait_for(client.failed.wait(), 240)
        assert "3 times" in (client.failure or "") and client.hangs == 3
    finally:
        await client.stop()


@pytest.mark.slow
async def test_a_stopped_engine_of_images_is_replaced_and_the_image_is_made(
    pipeline_folder: Folder,
) -> None:
    config = ImageServerConfig(
        engine=DiffusionConfig(model_path=str(pipeline_folder("flux")), num_threads=1)
    )
    engine = ImageClient(config.engine, log_level="error", watchdog_timeout=TIMEOUT)
    await engine.start()
    try:
        assert await engine.wait_ready(), engine.failure
        async with client_of(create_image_app(engine, config)) as client:
            stop(engine)
            answer = await client.post(
                "/v1/images/generations",
                json={"prompt": "a fox", "size": "32x32", "num_inference_steps": 1},
            )
            assert answer.status_code == 200 and engine.hangs == 1
    finally:
        await engine.stop()


async def test_time_in_which_the_server_itself_stands_still_is_no_silence_of_the_engine() -> None:
    """As when the whole machine is suspended."""
    watchdog = Watchdog(3.0)
    watchdog.heard(EngineAlive(doing="computing a step"))
    watch = asyncio.create_task(watchdog.watch(os.getpid, lambda: None))
    await asyncio.sleep(0)
    time.sleep(3.5)
    await asyncio.sleep(0.3)
    assert not watch.done() and watchdog.silence < 1.5
    watch.cancel()


async def test_a_process_that_builds_shows_life_by_using_the_processor() -> None:
    working, sleeping = Watchdog(1.0), Watchdog(1.0)
    for watchdog in (working, sleeping):
        watchdog.begin()
    resting = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(600)"
    )
    watches = [
        asyncio.create_task(watchdog.watch(lambda pid=pid: pid, lambda: None))  # type: ignore[misc]
        for watchdog, pid in ((working, os.getpid()), (sleeping, resting.pid))
    ]
    try:
        await asyncio.wait_for(watches[1], 60)
        assert not watches[0].done()
        working.heard(EngineAlive(doing="computing a step"))
        assert working.limit == 1.0 and sleeping.limit == 4.0
    finally:
        watches[0].cancel()
        resting.kill()
        await resting.wait()


async def test_of_a_process_that_is_heard_nobody_asks_what_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is found among all processes of the machine, while tokens wait for the event loop."""
    asked: list[int | None] = []
    monkeypatch.setattr(Watchdog, "_works", lambda watchdog, pid: asked.append(pid))
    watchdog = Watchdog(1.0)
    watch = asyncio.create_task(watchdog.watch(os.getpid, lambda: None))
    for _ in range(50):
        watchdog.heard(EngineAlive(doing="bringing graphs in", may_build=True))
        await asyncio.sleep(0.01)
    assert not asked
    await asyncio.sleep(0.5)
    watch.cancel()
    assert asked


@pytest.mark.parametrize("seconds", [-1.0, 1.0, float("inf"), float("nan")])
def test_a_timeout_that_would_end_healthy_engines_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="--watchdog-timeout must be 0"):
        ServerConfig(engine=EngineConfig(), watchdog_timeout=seconds)
