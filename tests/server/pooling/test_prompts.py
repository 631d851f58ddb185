"""Prompts that a folder names: texts of requests begin with them."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from http_fixtures import error_of
from pooling_here import client_here, load
from tiny_encoders import make_tiny_encoder, write_modules

PROMPTS = {"query": "red fox ", "document": "lazy ", "plain": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_encoder(tmp_path_factory.mktemp("embedder"), "bert")
    mode = "pooling_mode_mean_tokens"
    write_modules(folder, mode, prompts=PROMPTS, default_prompt="document")
    return load(folder)


@pytest.fixture
def client(model: Any) -> httpx.AsyncClient:
    return client_here(model)[0]


async def vector(client: httpx.AsyncClient, text: str, **members: Any) -> np.ndarray:
    answer = await client.post("/v1/embeddings", json={"input": text, **members})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


@pytest.mark.parametrize(("name", "start"), [(None, "lazy "), ("query", "red fox "), ("plain", "")])
async def test_a_text_begins_with_the_prompt_of_that_name(
    client: httpx.AsyncClient, name: str | None, start: str
) -> None:
    named = {} if name is None else {"prompt_name": name}
    found = await vector(client, "dog", **named)
    np.testing.assert_array_equal(found, await vector(client, start + "dog", prompt_name="plain"))


async def test_a_ranking_takes_the_prompts_of_queries_and_documents(
    client: httpx.AsyncClient,
) -> None:
    query = await vector(client, "cat", prompt_name="query")
    document = await vector(client, "dog", prompt_name="document")
    answer = await client.post("/v1/rerank", json={"query": "cat", "documents": ["dog"]})
    score = answer.json()["results"][0]["relevance_score"]
    np.testing.assert_allclose(score, query @ document, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [{"input": "dog", "prompt_name": "other"}, {"input": [5], "prompt_name": "query"}],
    ids=["unknown", "token ids"],
)
async def test_a_prompt_that_cannot_be_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    message = error_of(await client.post("/v1/embeddings", json=body), 400, "prompt_name")[
        "message"
    ]
    assert "prompt_name" in message
