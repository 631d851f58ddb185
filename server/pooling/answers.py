"""The answers of the pooling endpoints, for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from ..core.answers import Answer


class PoolingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """`embedding` is a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    object: Literal["list"]
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolingUsage


class ClassifyResult(Answer):
    """`probs` has a number for each label. `label` is the label with the largest one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyResult]
    usage: PoolingUsage


class RankedDocument(Answer):
    text: str


class RerankResult(Answer):
    """`index` is the index of the document in the request."""

    index: int
    relevance_score: float
    document: RankedDocument = RankedDocument(text="")


class RerankAnswer(Answer):
    """Results sorted by score, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class ScoreResult(Answer):
    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreResult]
    usage: PoolingUsage
