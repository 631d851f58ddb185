"""`/api/embed` and `/api/embeddings`: the vectors of `/v1/embeddings` in Ollama's form."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from pooling_here import client_here, load
from tiny_encoders import make_tiny_encoder, write_modules

from piecework.runtime.pooling.model import PoolingModel

TEXTS = ["a dog cat", "the fox"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    folder = make_tiny_encoder(tmp_path_factory.mktemp("embedder"), "bert")
    write_modules(folder, "pooling_mode_mean_tokens", max_length=24)
    return load(folder, chunked_prefill_size=64, max_running_requests=4)


@pytest.fixture
async def client(model: PoolingModel) -> AsyncIterator[httpx.AsyncClient]:
    client, _ = client_here(model)
    async with client:
        yield client


async def test_vectors_are_those_of_the_other_api(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()
    expected = np.array([each["embedding"] for each in answer["data"]])
    asked = {"model": "default:latest", "input": TEXTS, "keep_alive": "5m", "options": {}}
    told = (await client.post("/api/embed", json=asked)).json()
    assert told["prompt_eval_count"] == answer["usage"]["prompt_tokens"]
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(told["embeddings"], unit, atol=1e-6)
    old = await client.post("/api/embeddings", json={"model": "default", "prompt": TEXTS[0]})
    np.testing.assert_allclose(old.json()["embedding"], expected[0], atol=1e-6)
    few = (await client.post("/api/embed", json={**asked, "dimensions": 8})).json()["embeddings"]
    np.testing.assert_allclose(np.linalg.norm(few, axis=1), 1, atol=1e-6)
    assert {len(each) for each in few} == {8}


async def test_a_long_text_is_cut_unless_truncate_is_false(client: httpx.AsyncClient) -> None:
    body = {"model": "default", "input": "dog " * 100}
    told = (await client.post("/api/embed", json=body)).json()
    assert told["prompt_eval_count"] == 24
    refused = await client.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400 and "truncate: true" in refused.json()["error"]


async def test_bad_input_and_no_input(client: httpx.AsyncClient) -> None:
    empty = await client.post("/api/embed", json={"model": "default", "input": []})
    assert empty.json()["embeddings"] == []
    old = await client.post("/api/embeddings", json={"model": "default"})
    assert old.json() == {"embedding": []}
    for body, status in (
        ({"input": "x"}, 400),
        ({"model": "x", "input": "x"}, 404),
        ({"model": "default", "input": 5}, 400),
        ({"model": "default", "input": "x", "dimensions": 10**6}, 400),
        ({"model": "default", "input": ["x"] * 5000}, 400),
    ):
        answer = await client.post("/api/embed", json=body)
        assert answer.status_code == status and list(answer.json()) == ["error"], answer.text


async def test_the_model_is_listed_as_an_embedder(client: httpx.AsyncClient) -> None:
    (listed,) = (await client.get("/api/tags")).json()["models"]
    shown = (await client.post("/api/show", json={"model": listed["name"]})).json()
    assert shown["capabilities"] == ["embedding"]
