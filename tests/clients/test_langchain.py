"""LangChain, by OpenAI's API and by Anthropic's."""

from __future__ import annotations

from typing import Any

import pytest
from client_tasks import QUESTION, City, weather

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_anthropic")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["openai", "anthropic"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if request.param == "openai":
        return ChatOpenAI(
            base_url=f"{base_url}/v1", api_key="none", model="default", stream_usage=True
        )
    return ChatAnthropic(base_url=base_url, api_key="none", model="default", max_tokens=60)


def test_a_chat(model: Any) -> None:
    message = model.invoke(QUESTION, max_tokens=8)
    assert message.text
    assert message.usage_metadata["output_tokens"] <= 8


def test_a_stream(model: Any) -> None:
    chunks = list(model.stream(QUESTION, max_tokens=8))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 2 and whole.text
    assert whole.usage_metadata["output_tokens"] == 8


def test_a_tool_loop(model: Any) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    known = tool(weather)
    messages: list[Any] = [HumanMessage(QUESTION)]
    calling = model.bind_tools([known], tool_choice="any", strict=True, parallel_tool_calls=False)
    called = calling.invoke(messages, max_tokens=60)
    messages += [called, *(known.invoke(call) for call in called.tool_calls)]
    assert messages[-1].content.startswith("It rains in")
    assert model.invoke(messages, max_tokens=20).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_model(model: Any, method: str) -> None:
    found = model.with_structured_output(City, method=method).invoke(QUESTION, max_tokens=60)
    assert isinstance(found, City)
