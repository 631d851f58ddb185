"""What the endpoints of vectors and scores answer, for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from ..core.answers import Answer


class PoolingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    """`embedding`: numbers, or with `encoding_format` base64 those as float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    object: Literal["list"]
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolingUsage


class ClassifyResult(Answer):
    """`label`: the one with the largest of `probs`, which has a number for each label."""

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
    """`index`: the document's place in the request."""

    index: int
    relevance_score: float
    document: RankedDocument = RankedDocument(text="")


class RerankAnswer(Answer):
    """Best first."""

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
