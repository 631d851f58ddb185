"""The OpenAI Agents SDK by the Responses API, which is its default, and by chats."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from client_tasks import QUESTION, City, weather

agents = pytest.importorskip("agents")
pytestmark = pytest.mark.slow


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def model(base_url: str, request: pytest.FixtureRequest) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    return getattr(agents, request.param)(model="default", openai_client=client)


def agent(model: Any, **settings: Any) -> Any:
    # An answer that is cut off is an error to the SDK.
    ends: dict[str, Any] = {"max_tokens": 200, "extra_body": {"stop": ["."]}}
    sampling = agents.ModelSettings(temperature=0, **ends, **settings.pop("asked", {}))
    return agents.Agent(
        name="Weather", instructions="Be brief.", model=model, model_settings=sampling, **settings
    )


async def test_a_chat(model: Any) -> None:
    run = await agents.Runner.run(agent(model), QUESTION)
    assert run.final_output and run.context_wrapper.usage.output_tokens > 2


async def test_a_stream(model: Any) -> None:
    run = agents.Runner.run_streamed(agent(model), QUESTION)
    pieces = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(pieces) > 2 and "".join(pieces) == run.final_output


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop(model: Any, streamed: bool) -> None:
    tool = agents.function_tool(weather)
    asked = {"tool_choice": "required", "parallel_tool_calls": False}
    caller = agent(model, tools=[tool], asked=asked)
    if streamed:
        run = agents.Runner.run_streamed(caller, QUESTION, max_turns=3)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(caller, QUESTION, max_turns=3)
    outputs = [item.output for item in run.new_items if item.type == "tool_call_output_item"]
    assert outputs[0] in (weather("Bonn"), weather("Köln"))
    assert run.final_output and len(run.raw_responses) == 2


async def test_a_pydantic_model(model: Any) -> None:
    run = await agents.Runner.run(agent(model, output_type=City), QUESTION)
    assert isinstance(run.final_output, City)


async def test_a_conversation_by_its_last_response(base_url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(model="default", openai_client=client)
    first = await agents.Runner.run(agent(model), QUESTION)
    second = await agents.Runner.run(
        agent(model), "And in Köln?", previous_response_id=first.last_response_id
    )
    assert second.last_response_id is not None
    items = [item async for item in client.responses.input_items.list(second.last_response_id)]
    assert len(items) == 3
