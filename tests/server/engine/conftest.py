"""A model, and what it says."""

from __future__ import annotations

import pytest
from engine_clients import PROMPTS, params
from tiny_models import make_tiny_model

from piecework.runtime.llm import LLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its tokenizer alone knows the end token."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama", eos_token_id=None))


@pytest.fixture(scope="session")
def undisturbed(model: str) -> list[list[int]]:
    """What the same requests give in one process, without a crash."""
    llm = LLM(model, dtype="float32", max_total_tokens=4096, num_threads=1)
    return [
        done.token_ids for done in llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    ]
