"""`POST /v1/rerank`, as in Cohere's and Jina's APIs, and `/v1/score`, as in vLLM.

A reranker scores pairs of texts. With an embedder, the score is the cosine of the vectors.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...runtime.pooling.prompts import Start
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest
from ..http.body import JsonRoute
from ..serving.state import json_response
from .client import Vectors
from .requests import RerankRequest, ScoreRequest
from .state import PoolingServing, PoolingServingDep, PoolingUsage

router = APIRouter(route_class=JsonRoute)


class RankedDocument(Answer):
    text: str


class RerankResult(Answer):
    """`index` is the index of the document in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankAnswer(Answer):
    """Results sorted by score, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class ScoreResult(Answer, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(Answer, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreResult]
    usage: PoolingUsage


_RERANKED = answers(RerankAnswer, errors=BODY_ERRORS)
_SCORED = answers(ScoreAnswer, errors=BODY_ERRORS)


@router.post("/v1/rerank", responses=_RERANKED)
@router.post("/rerank", responses=_RERANKED)
@router.post("/v2/rerank", responses=_RERANKED)
async def rerank(body: RerankRequest, serving: PoolingServingDep) -> Response:
    """Return the relevance of each document to the query, best first."""
    serving.check_model(body.model)
    rid = f"rerank-{uuid.uuid4().hex}"
    sides, names = ([body.query], body.documents), ("query", "documents")
    prompts = serving.folder.prompts
    starts = prompts.of_query, prompts.of_document
    scores, tokens = await _scores(serving, rid, sides, names, starts, body.truncate_prompt_tokens)
    # The sort is stable: equal scores keep the order of the request.
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        RerankResult(
            index,
            scores[index],
            RankedDocument(body.documents[index]) if body.return_documents else UNSET,
        )
        for index in order
    ]
    return json_response(
        RerankAnswer(rid, serving.model_name, results, PoolingUsage(tokens, tokens))
    )


@router.post("/v1/score", responses=_SCORED)
@router.post("/score", responses=_SCORED)
async def score(body: ScoreRequest, serving: PoolingServingDep) -> Response:
    """Return a score for each pair of texts."""
    serving.check_model(body.model)
    rid = f"score-{uuid.uuid4().hex}"
    starts = (serving.folder.prompts.start(None),) * 2
    scores, tokens = await _scores(
        serving, rid, body.sides, body.names, starts, body.truncate_prompt_tokens
    )
    return json_response(
        ScoreAnswer(
            id=rid,
            created=int(time.time()),
            model=serving.model_name,
            data=[ScoreResult(index=index, score=value) for index, value in enumerate(scores)],
            usage=PoolingUsage(tokens, tokens),
        )
    )


async def _scores(
    serving: PoolingServing,
    rid: str,
    sides: tuple[Sequence[str], Sequence[str]],
    names: tuple[str, str],
    starts: tuple[Start, Start],
    cut: int | None,
) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of tokens.

    The first side has one text for all pairs, or one for each text of the second side. `starts` are
    the prompts that an embedder's texts of each side begin with.
    """
    first, second = sides
    one, other = names
    first_names = [f"{one}[{number}]" if len(first) > 1 else one for number in range(len(first))]
    second_names = [f"{other}[{number}]" for number in range(len(second))]
    characters = sum(map(len, first)) + sum(map(len, second))
    encoder = serving.inputs
    if len(serving.info.labels) > 1:
        raise InvalidRequest(
            f"This server has a classifier with {len(serving.info.labels)} labels, which has no "
            "single score; send the texts to /v1/classify.",
            code="not_a_reranker",
        )
    if serving.info.task == "embed":
        serving.check_room(len(first) + len(second), other)
        begins = [starts[0]] * len(first) + [starts[1]] * len(second)
        texts = [begin.text + text for begin, text in zip(begins, [*first, *second], strict=True)]
        text_names = [*first_names, *second_names]
        work = partial(encoder.texts, texts, text_names, cut=cut)
    else:
        serving.check_room(len(second), other)
        each = len(second) // len(first)
        pairs = list(zip([*first] * each, second, strict=True))
        pair_names = list(zip(first_names * each, second_names, strict=True))
        work = partial(encoder.pairs, pairs, pair_names, cut=cut)
    inputs = await serving.encode(characters, work)
    if serving.info.task == "embed":
        inputs = [
            each._replace(adapter=begin.adapter) for each, begin in zip(inputs, begins, strict=True)
        ]
    vectors = await serving.pool(rid, inputs)
    tokens = sum(len(each.token_ids) for each in inputs)
    if serving.info.task == "embed":
        return _cosines(vectors[: len(first)], vectors[len(first) :]).tolist(), tokens
    return vectors[:, 0].tolist(), tokens


def _cosines(first: Vectors, second: Vectors) -> Vectors:
    """Return the cosine of each row of `second` with the single or the same row of `first`."""
    unit = [
        each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), np.float32(1e-12))
        for each in (first, second)
    ]
    cosines: Vectors = (unit[0] * unit[1]).sum(axis=1)
    return cosines
