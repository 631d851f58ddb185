"""Engine clients with a real engine process, and what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.tokenizer.output_processor import RequestOutput, RequestState, TextOptions
from piecework.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer
from piecework.server.engine.client import EngineClient

POISON = 500
"""A token that ends the engine's process."""
POISONED_ENGINE = f"""
import os, sys
from piecework.runtime.engine import process, text
from piecework.runtime.engine.core import EngineCore

plain_step = EngineCore.step

def step(self):
    if any({POISON} in request.tokens[: request.num_prompt] for request in self._scheduler.waiting):
        os._exit(7)
    return plain_step(self)

EngineCore.step = step
sys.exit(process.run_engine(lambda: text))
"""
PROMPTS = [[1 + (7 * i + j) % 300 for j in range(5 + 3 * i)] for i in range(6)]


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
