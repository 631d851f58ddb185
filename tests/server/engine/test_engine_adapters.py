"""A new engine process loads the adapters of the one that was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from engine_clients import PROMPTS, collect, config, params, tokens, until
from tiny_adapters import make_adapter

from piecework.runtime.core.adapter_info import AdapterInfo
from piecework.runtime.tokenizer.output_processor import RequestState
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from piecework.server.engine.client import EngineClient
from piecework.server.engine.replicas import Replicas
from piecework.server.engine.state import EngineState, EngineUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
async def test_requests_of_adapters_resume_after_a_crash(model: str, tmp_path: Path) -> None:
    """One adapter was loaded while the engine ran, another was unloaded and still has a request."""
    paths = [make_adapter(tmp_path / f"{seed}", Path(model), seed=seed) for seed in range(2)]
    settings = config(model, enable_lora=True, speculative_algorithm="none")
    client = EngineClient(settings, load_tokenizer(model), log_level="warning")
    await client.start()
    assert await client.wait_ready(), client.failure
    try:
        loaded = [(await client.load_adapter(path.name, str(path))).adapter for path in paths]
        identities = ["", *(each.identity for each in loaded if each is not None)]

        async def answers(round: int, kills: bool) -> list[list[int]]:
            def asked(i: int, identity: str) -> Callable[[Tokenizer], RequestState]:
                rid, sampling = f"{round}-{i}", params(1)
                return lambda tokenizer: RequestState(
                    rid, PROMPTS[0], sampling, tokenizer, adapter=identity
                )

            jobs = [
                asyncio.create_task(collect(client, asked(*each))) for each in enumerate(identities)
            ]
            if kills:
                before = client.stats.generation_tokens_total
                await until(lambda: client.stats.generation_tokens_total > before + 40)
                assert (await client.unload_adapter(identities[2])).error is None
                os.kill(client.engine_pid or 0, signal.SIGKILL)
                await until(lambda: client.state is EngineState.RESTARTING)
            return [tokens(each) for each in await asyncio.gather(*jobs)]

        wanted = await answers(0, kills=False)
        assert await answers(1, kills=True) == wanted
        assert len(set(map(tuple, wanted))) == 3 and client.restarts == 1
        assert [each.name for each in await client.list_adapters()] == ["0"]
    finally:
        await client.stop()


@pytest.mark.slow
async def test_each_replica_has_the_adapters_and_resumes_the_requests_of_another(
    model: str, tmp_path: Path
) -> None:
    """One adapter is unloaded while requests of it run on the replica that is killed."""
    paths = [make_adapter(tmp_path / f"{seed}", Path(model), seed=seed) for seed in range(3)]
    settings = config(
        model, lora_modules=f"0={paths[0]}", max_loras=2, speculative_algorithm="none"
    )
    replicas = Replicas(2, settings, load_tokenizer(model), log_level="error")
    await replicas.start()
    assert await asyncio.wait_for(replicas.wait_ready(), 120), replicas.failure
    try:
        for path in paths[1:]:
            assert (await replicas.load_adapter(path.name, str(path))).error is None
        for each in replicas.replicas:
            assert [info.name for info in await each.list_adapters()] == ["0", "1", "2"]
        identities = ["", *(replicas.adapters[path.name].identity for path in paths)]

        async def answers(round: int, only: int | None = None) -> list[list[int]]:
            def asked(i: int) -> Callable[[Tokenizer], RequestState]:
                return lambda tokenizer: RequestState(
                    f"{round}-{i}", PROMPTS[0], params(1), tokenizer, adapter=identities[i % 4]
                )

            clients = [replicas if only is None else replicas.replicas[only]] * 8
            jobs = [collect(each, asked(i)) for i, each in enumerate(clients)]
            return [tokens(each) for each in await asyncio.gather(*jobs)]

        wanted = await answers(0, only=0)
        assert wanted[:4] == wanted[4:] and len(set(map(tuple, wanted))) == 4
        assert await answers(1, only=1) == wanted
        running = asyncio.create_task(answers(2))
        first, second = replicas.replicas
        await until(lambda: min(each.stats.running_requests for each in replicas.replicas) > 2)
        users = [{state.adapter for state in each.unfinished()} for each in replicas.replicas]
        gone = next(iter((users[0] - {""}) & set(identities[2:])))
        unloading = asyncio.create_task(replicas.unload_adapter(gone))
        await asyncio.sleep(0.1)
        assert any(state.adapter == gone for state in first.unfinished())
        os.kill(first.engine_pid or 0, signal.SIGKILL)
        await until(lambda: first.state is EngineState.RESTARTING)
        assert await running == wanted and second.restarts == 0
        with suppress(EngineUnavailable):
            await unloading
        await until(lambda: first.state is EngineState.READY)
        left = [each for each in identities[1:] if each != gone]
        async with asyncio.timeout(30):  # A new process reads them while it serves.
            for each in replicas.replicas:
                while [info.identity for info in await each.list_adapters()] != left:
                    await asyncio.sleep(0.05)
    finally:
        await replicas.stop()


async def test_a_restart_names_no_module_that_was_unloaded_or_replaced(model: str) -> None:
    def info(name: str, identity: str) -> AdapterInfo:
        return AdapterInfo(
            identity=identity, name=name, path=name, rank=1, num_layers=1, num_bytes=1
        )

    replicas = Replicas(2, config(model), load_tokenizer(model))
    first, second = replicas.replicas
    modules = tuple(info(name, f"{name}-1") for name in ("kept", "gone", "replaced", "changed"))
    first._name_modules(modules)
    del replicas.adapters["gone"]
    replicas.adapters["replaced"] = info("replaced", "other")
    second._name_modules(modules)
    first._name_modules((*modules[:3], info("changed", "changed-2")))
    assert {name: each.identity for name, each in replicas.adapters.items()} == {
        "kept": "kept-1",
        "replaced": "other",
        "changed": "changed-2",
    }
