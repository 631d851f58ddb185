"""A fault of this process or of the engine in one request ends that request; and a server without
an engine always ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from http_fixtures import client_of, error_of, make_app
from server_process import FLAGS, NO_PIECES, free_port

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.tokenizer.output_processor import RequestState
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from piecework.server.engine.client import EngineClient
from piecework.server.engine.state import EngineState

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTY_TOKEN = 77
BODY = {
    "prompt": [5, 6, 7],
    "ignore_eos": True,
    "temperature": 0,
    "logit_bias": {str(FAULTY_TOKEN): -100},
}
FAULTY = {**BODY, "max_tokens": 40, "logit_bias": {str(FAULTY_TOKEN): 100}}
"""Gets nothing but the token that cannot be detokenised."""


class FaultyTokenizer(Tokenizer):
    """One of its tokens cannot be detokenised."""

    @classmethod
    def of(cls, model: str) -> FaultyTokenizer:
        tokenizer = load_tokenizer(model)
        tokenizer.__class__ = cls
        assert isinstance(tokenizer, cls)
        return tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == FAULTY_TOKEN:
            raise IndexError("no such token")
        return super().token_bytes(token_id)


def engine_of(model: str, tokenizer: Tokenizer | None = None, **settings: Any) -> EngineClient:
    config = EngineConfig(
        model_path=model,
        dtype="float32",
        max_total_tokens=4096,
        num_threads=1,
        max_running_requests=8,
        disable_cuda_graph=True,
    )
    return EngineClient(
        config, tokenizer or FaultyTokenizer.of(model), log_level="warning", **settings
    )


@contextlib.asynccontextmanager
async def running(model: str, **settings: Any) -> AsyncIterator[EngineClient]:
    client = engine_of(model, **settings)
    await client.start()
    try:
        assert await client.wait_ready(), client.failure
        yield client
    finally:
        await client.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: str) -> AsyncIterator[EngineClient]:
    """One for all tests that leave it untouched."""
    async with running(model) as client:
        yield client


def http(engine: EngineClient) -> httpx.AsyncClient:
    return client_of(make_app(engine))  # type: ignore[arg-type]


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/completions", json=body)


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def assert_untouched(engine: EngineClient, client: httpx.AsyncClient) -> None:
    """The engine is the one that began, serves, and holds nothing."""
    assert (engine.restarts, engine.state) == (0, EngineState.READY)
    assert (await complete(client, {**BODY, "max_tokens": 1})).status_code == 200
    await until(lambda: engine.stats.running_requests == engine.stats.kv_tokens_used == 0)


async def test_a_token_that_cannot_be_detokenised_ends_its_request_and_no_other(
    engine: EngineClient,
) -> None:
    """More often than an engine may crash."""
    async with http(engine) as client:
        healthy = asyncio.create_task(complete(client, {**BODY, "max_tokens": 600}))
        await until(lambda: engine.stats.generation_tokens_total > 5)
        for _ in range(4):
            error = error_of(await complete(client, FAULTY), 500)
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert not healthy.done()
        assert (await healthy).json()["usage"]["completion_tokens"] == 600
        await assert_untouched(engine, client)


async def test_a_stream_whose_next_token_cannot_be_detokenised_ends_with_an_error(
    engine: EngineClient, monkeypatch: Any
) -> None:
    """The engine is told: what is left of the request is computed for nobody."""
    plain, calls = FaultyTokenizer.token_bytes, iter(range(10**6))
    monkeypatch.setattr(
        FaultyTokenizer,
        "token_bytes",
        lambda self, token: plain(self, FAULTY_TOKEN if next(calls) > 20 else token),
    )
    async with http(engine) as client:
        answer = await complete(client, {**BODY, "max_tokens": 3000, "stream": True})
        monkeypatch.undo()
        assert answer.status_code == 200
        last = answer.text.rstrip().rsplit("\n\n", 1)[-1]
        assert '"code":"engine_error"' in last and '"type":"server_error"' in last
        before = engine.stats.generation_tokens_total
        await assert_untouched(engine, client)
        assert before + 1 <= engine.stats.generation_tokens_total < 2500


async def test_a_request_that_cannot_be_sent_is_its_own_error(engine: EngineClient) -> None:
    """A lone surrogate has no bytes; were the request kept, the next life of the engine could not
    begin.
    """
    async with http(engine) as client:
        body = b'{"rid": "\\ud800", "input_ids": [5], "sampling_params": {"max_new_tokens": 1}}'
        answer = await client.post(
            "/generate", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 500)
        assert not engine._requests
        await assert_untouched(engine, client)


@pytest.mark.slow
async def test_requests_that_cannot_be_given_to_the_next_life_end_and_the_others_go_on(
    model: str, monkeypatch: Any
) -> None:
    plain = RequestState.to_message
    async with running(model) as engine, http(engine) as client:
        jobs = [
            asyncio.create_task(complete(client, {**BODY, "max_tokens": count}))
            for count in (1500, 1501)
        ]
        await until(lambda: engine.stats.generation_tokens_total > 5)

        def to_message(self: Any) -> Any:
            if self.params.max_new_tokens == 1501:
                raise RuntimeError("no message of this one")
            return plain(self)

        monkeypatch.setattr(RequestState, "to_message", to_message)
        os.kill(engine.engine_pid or 0, signal.SIGKILL)
        healthy, faulty = [await job for job in jobs]
        assert healthy.json()["usage"]["completion_tokens"] == 1500
        assert "new engine process" in error_of(faulty, 500)["message"]


CHATTY_ENGINE = """
import sys
import msgspec
from piecework.runtime.engine import process, text
from piecework.runtime.process.mailbox import Mailbox
from piecework.runtime.core.messages import StepOutput

plain_send = Mailbox.send

def send(self, message):
    outputs = message.outputs if isinstance(message, StepOutput) else []
    if any(67 in output.token_ids for output in outputs):
        # What the request with this token gets cannot be read by the other side.
        fields = msgspec.to_builtins(message)
        for output in fields["outputs"]:
            output["token_ids"] = "not a list"
        self._socket.send([b"StepOutput", msgspec.msgpack.encode(fields)])
        self._socket.send([b"Gossip", b"\\xc1"])
    else:
        plain_send(self, message)

Mailbox.send = send
sys.exit(process.run_engine(lambda: text))
"""


async def test_a_message_that_cannot_be_read_ends_the_requests_that_it_names(
    model: str, tmp_path: Path
) -> None:
    """And a message that nobody knows ends none."""
    script = tmp_path / "chatty.py"
    script.write_text(CHATTY_ENGINE)
    async with (
        running(model, command=(sys.executable, str(script))) as engine,
        http(engine) as client,
    ):
        for _ in range(4):
            error = error_of(
                await complete(client, {**BODY, "max_tokens": 40, "logit_bias": {"67": 100}}), 500
            )
            assert error["code"] == "engine_error"
        await assert_untouched(engine, client)


@pytest.mark.parametrize("place", ["end", "interrupted"])
async def test_an_engine_is_given_up_whatever_goes_wrong_on_the_way(
    model: str, place: str, monkeypatch: Any
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("not even this works")

    command = (sys.executable, "-c", "raise SystemExit(3)")
    client = engine_of(model, command=command)
    if place == "end":
        monkeypatch.setattr(RequestState, "end", fail)
    else:
        monkeypatch.setattr(client, "_interrupted", fail)
    await client.start()
    async with http(client) as web:
        waiting = asyncio.create_task(complete(web, BODY))
        await asyncio.wait_for(client.failed.wait(), 30)
        assert client.state is EngineState.FAILED and client.failure
        waiting.cancel()
    await asyncio.wait_for(client.stop(), 10)


async def test_an_engine_process_that_cannot_be_started_is_given_up(model: str) -> None:
    client = engine_of(model, command=("/no/such/program",))
    await client.start()
    assert not await asyncio.wait_for(client.wait_ready(), 30)
    assert client.failed.is_set() and "/no/such/program" in (client.failure or "")
    await client.stop()


SERVER_THAT_CANNOT_TELL = """
import sys
from piecework.runtime.tokenizer.output_processor import RequestState
from piecework.cli.main import main

def end(self, reason, error):
    raise RuntimeError("not even this works")

RequestState.end = end
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
async def test_a_server_whose_engine_is_gone_ends_though_its_requests_cannot_be_told(
    model: str, tmp_path: Path
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER_THAT_CANNOT_TELL)
    port = free_port()
    flags = ["serve", "--model-path", model, "--port", str(port), *FLAGS, NO_PIECES]
    server = subprocess.Popen(
        [sys.executable, str(script), *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await until_ready(client)
            waiting = asyncio.create_task(complete(client, {**BODY, "max_tokens": 1900}))
            killed: set[int] = set()
            while len(killed) < 3:
                for engine in psutil.Process(server.pid).children():
                    engine.kill()
                    killed.add(engine.pid)
                await asyncio.sleep(0.05)
            _, printed = await asyncio.to_thread(server.communicate, timeout=30)
            await asyncio.gather(waiting, return_exceptions=True)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 1
    assert "piecework serve: error: the engine process ended 3 times" in printed


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "fault",
    [
        "TypeError",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("KeyError", "AttributeError")),
    ],
)
async def test_a_model_that_cannot_be_built_is_tried_once(model: str, fault: str) -> None:
    """The same fault would come at each start."""
    script = (
        "from piecework.runtime.engine import process, text\n"
        f"def build(*_):\n    raise {fault}('of a library')\n"
        "text.build = build\n"
        "raise SystemExit(process.run_engine(lambda: text))"
    )
    client = engine_of(model, command=(sys.executable, "-c", script))
    await client.start()
    try:
        await asyncio.wait_for(client.failed.wait(), 60)
        assert client.user_error and client.restarts == 0
        assert fault in (client.failure or "") and "of a library" not in (client.failure or "")
    finally:
        await client.stop()
