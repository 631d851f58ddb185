"""`POST /api/embed`, and its older form `/api/embeddings`."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest
from ..core.ollama_errors import OllamaErrorAnswer
from ..http.body import CurlJsonRoute
from ..pooling.client import Vectors
from ..pooling.embeddings import embed
from ..pooling.requests import EmbeddingsRequest
from ..pooling.state import PoolingServing, PoolingServingDep
from ..serving.state import json_response
from .requests import EmbedRequest, OldEmbeddingsRequest
from .to_openai import ollama_names

router = APIRouter(route_class=CurlJsonRoute)
_WHOLE_TEXT = -1  # Texts are cut at the model's maximum.


class OllamaEmbeddings(Answer, kw_only=True):
    """Vectors of length 1. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float] | msgspec.Raw]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(Answer):
    embedding: list[float] | msgspec.Raw


@router.post(
    "/api/embed",
    responses=answers(OllamaEmbeddings, errors=BODY_ERRORS, error=OllamaErrorAnswer),
)
async def embed_texts(body: EmbedRequest, serving: PoolingServingDep) -> Response:
    """Return a vector of length 1 for each text."""
    began = time.monotonic_ns()
    cut = _WHOLE_TEXT if body.truncate else None
    asked = {"input": body.input, "dimensions": body.dimensions, "truncate_prompt_tokens": cut}
    rows, tokens = await _vectors(serving, body.model, asked, normalizes=True)
    answer = OllamaEmbeddings(
        model=body.model,
        embeddings=rows,
        total_duration=time.monotonic_ns() - began,
        prompt_eval_count=tokens,
    )
    return json_response(answer)


@router.post(
    "/api/embeddings",
    responses=answers(OllamaEmbedding, errors=BODY_ERRORS, error=OllamaErrorAnswer),
)
async def embed_prompt(body: OldEmbeddingsRequest, serving: PoolingServingDep) -> Response:
    """Return the vector of one text, as the model makes it."""
    asked = {"input": body.prompt, "truncate_prompt_tokens": _WHOLE_TEXT}
    rows, _ = await _vectors(serving, body.model, asked, normalizes=False)
    return json_response(OllamaEmbedding(rows[0] if rows else []))


async def _vectors(
    serving: PoolingServing, model: str, asked: dict[str, Any], *, normalizes: bool
) -> tuple[list[Any], int]:
    """Return vectors as JSON, and the number of tokens. Raise `InvalidRequest`.

    Without a text, clients only want the model to be loaded, and there is no vector.
    """
    if not asked["input"]:
        serving.check_model(model)
        return [], 0
    try:
        with ollama_names():
            vectors, tokens = await embed(
                serving, EmbeddingsRequest.model_validate({"model": model, **asked})
            )
    except InvalidRequest as error:
        error.message = error.message.replace("truncate_prompt_tokens: -1", "truncate: true")
        raise
    # Run in a thread, because encoding two million numbers takes a second.
    return await serving.threads.run(_encoded, vectors, normalizes=normalizes), tokens


def _encoded(vectors: Vectors, *, normalizes: bool) -> list[msgspec.Raw]:
    if normalizes:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return [msgspec.Raw(msgspec.json.encode(row.tolist())) for row in vectors]
