"""A model and what it says, and an engine of it that a test may end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_clients import PROMPTS, params, start
from tiny_models import make_tiny_model

from piecework.runtime.llm import LLM
from piecework.server.engine.client import EngineClient


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest_asyncio.fixture(loop_scope="session")
async def own_engine(model: str) -> AsyncIterator[EngineClient]:
    """For tests that end it."""
    client = await start(model)
    yield client
    await client.stop()


@pytest.fixture(scope="session")
def undisturbed(model: str) -> list[list[int]]:
    """What the same requests give in one process, without a crash."""
    llm = LLM(model, dtype="float32", max_total_tokens=4096, num_threads=1)
    return [
        done.token_ids for done in llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    ]
