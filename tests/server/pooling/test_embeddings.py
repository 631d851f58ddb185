"""`/v1/embeddings`: what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from batch_fixtures import create, ended, lines_of, upload
from declared import check_answer
from http_fixtures import error_of
from openai.types import CreateEmbeddingResponse
from pooling_here import PoolingHere, client_here, load
from tiny_encoders import make_tiny_encoder, write_modules

from piecework.runtime.core.pooling_messages import INPUTS_PER_REQUEST
from piecework.runtime.pooling.model import PoolingModel, PoolInput
from piecework.server.config.keys import hash_of

PATH = "/v1/embeddings"
LONGEST = 24
IDS = [2, 5, 7, 8, 3]
"""Of `the fox dog`-like texts: [CLS] a dog cat [SEP]."""
TEXT = "a dog cat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    folder = make_tiny_encoder(tmp_path_factory.mktemp("embedder"), "bert")
    write_modules(folder, "pooling_mode_mean_tokens", max_length=LONGEST)
    return load(folder, chunked_prefill_size=64, max_running_requests=4)


@pytest.fixture
async def served(model: PoolingModel) -> AsyncIterator[tuple[httpx.AsyncClient, PoolingHere]]:
    client, engine = client_here(model, max_queued_requests=3)
    async with client:
        yield client, engine


@pytest.fixture
def client(served: tuple[httpx.AsyncClient, PoolingHere]) -> httpx.AsyncClient:
    return served[0]


async def arrival(engine: PoolingHere) -> None:
    async with asyncio.timeout(10):
        while not engine.scheduler.has_work:
            await asyncio.sleep(0)


def vectors_of(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [entry["embedding"] for entry in answer.json()["data"]]


@pytest.mark.parametrize("given", [TEXT, [TEXT], IDS, [IDS]], ids=["text", "texts", "ids", "lists"])
async def test_texts_and_token_ids_give_the_models_vectors(
    client: httpx.AsyncClient, model: PoolingModel, given: Any
) -> None:
    answer = await client.post(PATH, json={"input": given, "model": "tiny"})
    expected = model.run([PoolInput(np.array(IDS, np.int32), len(IDS))])
    np.testing.assert_array_equal(np.array(vectors_of(answer), np.float32), expected)
    assert answer.json()["usage"] == {"prompt_tokens": len(IDS), "total_tokens": len(IDS)}
    check_answer((await client.get("/openapi.json")).json(), "POST", PATH, answer)


async def test_the_log_of_requests_counts_inputs(
    model: PoolingModel, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = client_here(model, log_requests=True)
    async with client:
        await client.post(PATH, json={"input": [IDS, IDS]})
    (line,) = [one.__dict__["fields"] for one in caplog.records if one.name.endswith("requests")]
    assert (line["model"], line["prompt_tokens"]) == ("tiny", 2 * len(IDS))


async def test_vectors_come_in_the_order_of_the_inputs(client: httpx.AsyncClient) -> None:
    words = ["fox", "dog", "cat", "red", "never"]
    texts = [" ".join(words[: 1 + number % 5]) for number in range(3 * INPUTS_PER_REQUEST + 1)]
    together = vectors_of(await client.post(PATH, json={"input": texts}))
    for number in (0, 1, 4, 50, len(texts) - 1):
        alone = vectors_of(await client.post(PATH, json={"input": texts[number]}))[0]
        np.testing.assert_allclose(together[number], alone, atol=1e-6)


async def test_base64_holds_the_same_numbers(client: httpx.AsyncClient) -> None:
    plain = vectors_of(await client.post(PATH, json={"input": TEXT}))[0]
    text = vectors_of(await client.post(PATH, json={"input": TEXT, "encoding_format": "base64"}))
    found = np.frombuffer(base64.b64decode(text[0]), "<f4")  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, np.array(plain, np.float32))


async def test_fewer_dimensions_are_the_first_ones_brought_back_to_a_length_of_one(
    client: httpx.AsyncClient,
) -> None:
    whole = np.array(vectors_of(await client.post(PATH, json={"input": TEXT}))[0][:8])
    short = vectors_of(await client.post(PATH, json={"input": TEXT, "dimensions": 8}))[0]
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-6)


async def test_a_text_cannot_hold_a_special_token(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={"input": "a [SEP] dog"})
    # Five tokens are the words and brackets around them, which [SEP] is not one of.
    assert answer.json()["usage"]["prompt_tokens"] > 5


@pytest.mark.parametrize("cut", [5, -1])
async def test_a_long_text_is_cut_where_that_is_asked_for(
    client: httpx.AsyncClient, cut: int
) -> None:
    most = LONGEST if cut == -1 else cut
    kept = " ".join(["fox"] * (most - 2))
    body = {"input": " ".join(["fox"] * 60), "truncate_prompt_tokens": cut}
    cut_off = await client.post(PATH, json=body)
    assert cut_off.json()["usage"]["prompt_tokens"] == most
    assert vectors_of(cut_off) == vectors_of(await client.post(PATH, json={"input": kept}))


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}


@pytest.mark.parametrize("part", [IMAGE, {"image": "https://a.example/cat.png"}])
@pytest.mark.parametrize("alone", [True, False])
async def test_images_are_refused_in_one_sentence(
    client: httpx.AsyncClient, part: dict[str, Any], alone: bool
) -> None:
    answer = await client.post(PATH, json={"input": part if alone else ["a", part]})
    said = error_of(answer, 400, "input")["message"]
    assert f"input {int(not alone)} is an image, and images are not embedded yet; send" in said


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": [1, "a"]}, "input", "invalid_value"),
        ({"input": {"text": "a"}}, "input", "invalid_value"),
        ({"input": [{"type": []}, {"type": {}}]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "too_many_sequences"),
        ({"input": [5, 64]}, "input", "invalid_token_id"),
        ({"input": [[5], [-1]]}, "input[1]", "invalid_token_id"),
        ({"input": "fox " * 60}, "input", "context_length_exceeded"),
        ({"input": ["fox", "fox " * 23]}, "input[1]", "context_length_exceeded"),
        ({"input": [5] * 25}, "input", "context_length_exceeded"),
        ({"input": "fox " * 50_000}, "input", "context_length_exceeded"),
        ({"input": "f" * (2**20 + 1)}, "input", "text_too_long"),
        ({"input": "a", "dimensions": 33}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 25}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": [""], "truncate_prompt_tokens": -1}, "input", "invalid_value"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, code: str
) -> None:
    assert error_of(await client.post(PATH, json=body), 400, param)["code"] == code


async def test_another_model_is_not_here(client: httpx.AsyncClient) -> None:
    error_of(await client.post(PATH, json={"input": "a", "model": "other"}), 404, "model")


async def test_who_wants_text_is_told_what_is_here(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={"messages": []})
    assert "/v1/embeddings" in error_of(answer, 404)["message"]


async def test_a_full_queue_is_told_and_what_waits_is_answered(
    served: tuple[httpx.AsyncClient, PoolingHere],
) -> None:
    client, engine = served
    engine.paused = True
    many = {"input": ["fox"] * (INPUTS_PER_REQUEST * (engine.capacity - 1))}
    waiting = asyncio.create_task(client.post(PATH, json=many))
    await arrival(engine)
    refused = await client.post(PATH, json={"input": ["fox"] * (INPUTS_PER_REQUEST + 1)})
    assert error_of(refused, 503)["code"] == "queue_full" and refused.headers["Retry-After"]
    engine.paused = False
    engine.step()
    assert len(vectors_of(await waiting)) == len(many["input"])


async def test_a_client_that_leaves_is_computed_no_further(
    served: tuple[httpx.AsyncClient, PoolingHere],
) -> None:
    client, engine = served
    engine.paused = True
    waiting = asyncio.create_task(client.post(PATH, json={"input": ["fox"] * 100}))
    await arrival(engine)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not engine.scheduler.has_work and engine.scheduler.stats().running_requests == 0
    assert "num_aborted_requests_total" in (await client.get("/metrics")).text


async def test_vectors_are_of_the_openai_clients_types_also_in_batches(
    model: PoolingModel, tmp_path: Path
) -> None:
    client, _ = client_here(model, max_queued_requests=3, batch_dir=str(tmp_path))
    async with client:
        whole = (await client.post(PATH, json={"input": TEXT})).json()
        found = CreateEmbeddingResponse.model_validate_json(json.dumps(whole), strict=True)
        assert found.model_extra == {} or found.model_extra is None
        asked = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"input": TEXT}}
        batch = await create(client, await upload(client, [asked]), endpoint=PATH)
        told = await ended(client, batch["id"])
        (answer,) = await lines_of(client, told["output_file_id"])
    assert answer["response"]["body"]["data"] == whole["data"]


async def test_inputs_count_for_the_key_s_tokens(model: PoolingModel, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"name": "k", "sha256": hash_of(b"k"), "tokens_per_minute": 1000}))
    client, _ = client_here(model, api_keys=str(keys))
    async with client:
        client.headers["Authorization"] = "Bearer k"
        body = {"model": "tiny", "input": [TEXT, TEXT]}
        used = (await client.post(PATH, json=body)).json()["usage"]["total_tokens"]
        left = (await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"]
    assert used > 0 and int(left) == 1000 - used
