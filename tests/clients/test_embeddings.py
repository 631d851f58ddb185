"""Vectors and reranking through the libraries that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest
from server_process import ready
from tiny_encoders import make_tiny_encoder

pytestmark = pytest.mark.slow
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
TEXTS = ["the quick fox", "a lazy dog sleeps"]
FLAGS = ["--num-threads", "1", "--log-level", "warning"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ready(str(make_tiny_encoder(tmp_path_factory.mktemp("e"), "bert")), common=FLAGS) as one:
        yield one.url


@pytest.fixture(scope="module")
def vectors(embedder: str) -> list[list[float]]:
    """By the `openai` client, which asks for base64."""
    client = openai.OpenAI(base_url=f"{embedder}/v1", api_key="none", max_retries=0)
    return [one.embedding for one in client.embeddings.create(model="default", input=TEXTS).data]


def test_langchain(embedder: str, vectors: list[list[float]]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(
        base_url=f"{embedder}/v1",
        api_key="none",
        model="default",
        # Else it sends token ids of OpenAI's own vocabulary.
        check_embedding_ctx_length=False,
    )
    assert client.embed_documents(TEXTS) == [pytest.approx(one, abs=1e-5) for one in vectors]
    assert client.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-5)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(embedder: str, vectors: list[list[float]], provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    answer = litellm.embedding(
        model=f"{provider}/default", input=TEXTS, api_base=f"{embedder}/v1", api_key="none"
    )
    assert [one["embedding"] for one in answer.data] == [
        pytest.approx(one, abs=1e-5) for one in vectors
    ]


def test_reranking_with_litellm(tmp_path_factory: pytest.TempPathFactory) -> None:
    litellm = pytest.importorskip("litellm")
    folder = make_tiny_encoder(tmp_path_factory.mktemp("r"), "bert", classifier=True)
    with ready(str(folder), common=FLAGS) as server:
        answer = litellm.rerank(
            model="hosted_vllm/default",
            query="the fox",
            documents=TEXTS,
            top_n=1,
            api_base=server.url,
            api_key="none",
        )
    (best,) = answer.results
    assert best["index"] in (0, 1) and best["relevance_score"] > 0
