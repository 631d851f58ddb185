"""Instructor, whose every request is a Pydantic model."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from client_tasks import QUESTION, City

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.slow
USER = {"role": "user", "content": QUESTION}
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


def client(base_url: str, mode: str) -> Any:
    opened = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(opened, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_pydantic_model(base_url: str, mode: str) -> None:
    found, raw = client(base_url, mode).chat.completions.create_with_completion(
        model="default", response_model=City, messages=[USER], max_tokens=60, max_retries=0
    )
    assert isinstance(found, City) and raw.usage.completion_tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_streamed_model(base_url: str, mode: str) -> None:
    parts = list(
        client(base_url, mode).chat.completions.create_partial(
            model="default", response_model=City, messages=[USER], max_tokens=60, max_retries=0
        )
    )
    assert City.model_validate(parts[-1].model_dump())


def test_by_anthropics_api(base_url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    opened = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    found = instructor.from_anthropic(opened).messages.create(
        model="default", response_model=City, messages=[USER], max_tokens=60, max_retries=0
    )
    assert isinstance(found, City)
