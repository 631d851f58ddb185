"""`/v1/rerank` and `/v1/score`: numbers, their order, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from declared import check_answer
from http_fixtures import error_of
from pooling_here import client_here, load
from tiny_encoders import make_tiny_encoder, write_modules
from transformers import AutoModelForSequenceClassification, AutoTokenizer

QUERY = "the quick fox"
DOCUMENTS = ["a dog sleeps", "the red fox jumps over a lazy brown cat", "never", "brown"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("reranker"), "bert", classifier=True)


@pytest.fixture(scope="module")
def reranker_app(reranker: Path) -> Any:
    return load(reranker, context_length=32)


@pytest.fixture
def client(reranker_app: Any) -> httpx.AsyncClient:
    return client_here(reranker_app)[0]


@pytest.fixture(scope="module")
def expected(reranker: Path) -> list[float]:
    """What transformers says of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(reranker)
    model = AutoModelForSequenceClassification.from_pretrained(reranker).eval()
    with torch.no_grad():
        return [
            float(torch.sigmoid(model(**tokenizer(QUERY, text, return_tensors="pt")).logits))
            for text in DOCUMENTS
        ]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_best_first(
    client: httpx.AsyncClient, expected: list[float], path: str
) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS[:2] + [{"text": t} for t in DOCUMENTS[2:]]}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    order = np.argsort(-np.array(expected))
    assert [entry["index"] for entry in results] == order.tolist()
    scores = [entry["relevance_score"] for entry in results]
    np.testing.assert_allclose(scores, np.array(expected)[order], atol=1e-6)
    assert [entry["document"]["text"] for entry in results] == [DOCUMENTS[i] for i in order]
    if path == "/v1/rerank":
        check_answer((await client.get("/openapi.json")).json(), "POST", path, answer)


async def test_only_the_best_without_their_texts(client: httpx.AsyncClient) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": False}
    results = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert [set(entry) for entry in results] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("first", [QUERY, [QUERY] * len(DOCUMENTS)], ids=["one", "each"])
async def test_scores_are_those_of_the_pairs(
    client: httpx.AsyncClient, expected: list[float], names: tuple[str, str], first: Any
) -> None:
    answer = await client.post("/v1/score", json={names[0]: first, names[1]: DOCUMENTS})
    scores = [entry["score"] for entry in answer.json()["data"]]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    check_answer((await client.get("/openapi.json")).json(), "POST", "/v1/score", answer)


async def test_an_embedders_score_is_the_cosine(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "modernbert")
    write_modules(folder, "pooling_mode_cls_token", normalize=False, dense=(32, 8))
    client, _ = client_here(load(folder))
    texts = [QUERY, *DOCUMENTS[:3]]
    answer = await client.post("/v1/embeddings", json={"input": texts})
    vectors = np.array([entry["embedding"] for entry in answer.json()["data"]])
    assert vectors.shape == (4, 8)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    answer = await client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS[:3]})
    scores = [entry["score"] for entry in answer.json()["data"]]
    np.testing.assert_allclose(scores, unit[1:] @ unit[0], atol=1e-6)


async def test_a_reranker_makes_no_vectors(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"input": "a"})
    assert "/v1/rerank" in error_of(answer, 400)["message"]


async def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(
    client: httpx.AsyncClient, reranker: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reranker)
    long = "fox " * 50
    body = {"text_1": QUERY, "text_2": long, "truncate_prompt_tokens": 16}
    answer = (await client.post("/v1/score", json=body)).json()
    kept = tokenizer(QUERY, long, truncation="longest_first", max_length=16)["input_ids"]
    assert answer["usage"]["prompt_tokens"] == len(kept) == 16
    same = {"text_1": QUERY, "text_2": " ".join(["fox"] * (16 - 3 - 3))}
    alone = (await client.post("/v1/score", json=same)).json()
    assert answer["data"] == alone["data"]


@pytest.mark.parametrize(
    ("query", "documents"), [("fox " * 4000, ["fox " * 4000]), ("fox " * 20_000, ["dog"] * 200)]
)
async def test_long_texts_that_are_cut_cost_no_more_than_they_have_characters(
    client: httpx.AsyncClient, query: str, documents: list[str]
) -> None:
    """Every pair of what is cut off would take gigabytes, and a query that is read again for each
    document, 200 times as long.
    """

    async def seconds(query: str, documents: list[str]) -> float:
        body = {"query": query, "documents": documents, "truncate_prompt_tokens": 16}
        began = time.process_time()
        answer = await client.post("/v1/rerank", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 16 * len(documents)
        return time.process_time() - began

    texts = [query, *dict.fromkeys(documents)]
    once = sum([await seconds(text, ["fox " * 16]) for text in texts])
    short = await seconds("fox " * 16, ["fox " * 16] * len(documents))
    assert await seconds(query, documents) < 3 * (once + short)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "a.png"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["fox " * 40]}, "documents[0]"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error_of(await client.post(path, json=body), 400, param)
