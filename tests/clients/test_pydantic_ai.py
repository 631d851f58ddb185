"""Pydantic AI by OpenAI's API."""

from __future__ import annotations

from typing import Any

import pytest
from client_tasks import QUESTION, City, weather

pydantic_ai = pytest.importorskip("pydantic_ai")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(base_url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    settings = {"max_tokens": 60, "temperature": 0}
    return OpenAIChatModel("default", provider=provider, settings=settings)


async def test_a_chat(model: Any) -> None:
    assert (await pydantic_ai.Agent(model).run(QUESTION)).output


async def test_a_stream(model: Any) -> None:
    async with pydantic_ai.Agent(model).run_stream(QUESTION) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 2 and run.usage.output_tokens > 2


async def test_a_tool_loop(model: Any) -> None:
    def settings(context: Any) -> dict[str, str]:
        return {"tool_choice": "required" if context.run_step == 1 else "none"}

    agent = pydantic_ai.Agent(model, tools=[weather], model_settings=settings)
    run = await agent.run(QUESTION)
    parts = [part.part_kind for message in run.all_messages() for part in message.parts]
    assert "tool-call" in parts and "tool-return" in parts and run.output


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_a_pydantic_model(model: Any, kind: str) -> None:
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(City))
    assert isinstance((await agent.run(QUESTION)).output, City)
