"""`POST /v1/embeddings`, as in OpenAI's API."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from ...runtime.pooling.prompts import Prompts, Start
from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest
from ..http.body import JsonRoute
from .client import Vectors
from .inputs import Input, InputEncoder
from .requests import EmbeddingsRequest
from .state import PoolingServing, PoolingServingDep, PoolingUsage

router = APIRouter(route_class=JsonRoute)


class EmbeddingAnswer(Answer, kw_only=True):
    """`embedding` is a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str | msgspec.Raw


class EmbeddingsAnswer(Answer, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolingUsage


@router.post("/v1/embeddings", responses=answers(EmbeddingsAnswer, errors=BODY_ERRORS))
async def create_embeddings(body: EmbeddingsRequest, serving: PoolingServingDep) -> Response:
    """Return a vector for each text."""
    vectors, tokens = await embed(serving, body)
    # Run in a thread, because encoding two million numbers takes a second.
    content = await serving.threads.run(
        _encoded,
        vectors,
        serving.model_name,
        tokens,
        as_text=body.encoding_format == "base64",
    )
    return Response(content, media_type="application/json")


async def embed(serving: PoolingServing, body: EmbeddingsRequest) -> tuple[Vectors, int]:
    """Return the vectors of a request and the number of its tokens. Raise `InvalidRequest`, and
    the errors of `PoolingServing.pool`.
    """
    serving.check_model(body.model)
    info = serving.info
    if info.task != "embed":
        raise InvalidRequest(
            "This server has a classifier, which makes scores and no vectors; send pairs of texts "
            "to /v1/rerank or /v1/score, or texts to /v1/classify.",
            code="not_an_embedder",
        )
    if body.dimensions is not None and body.dimensions > info.size:
        raise InvalidRequest(
            f"dimensions: this model's vectors have {info.size} numbers, got {body.dimensions}.",
            param="dimensions",
            code="invalid_value",
        )
    serving.check_room(len(body.input), "input")
    start = _start(serving.folder.prompts, body)
    characters = sum(len(each) for each in body.input)
    inputs = await serving.encode(characters, partial(_encode, serving.inputs, body, start))
    vectors = await serving.pool(f"embd-{uuid.uuid4().hex}", inputs)
    tokens = sum(len(each.token_ids) for each in inputs)
    return shortened(vectors, body.dimensions, normalizes=info.normalizes), tokens


def _start(prompts: Prompts, body: EmbeddingsRequest) -> Start:
    """Return the prompt that the request's texts begin with. Raises `InvalidRequest`."""
    name = body.prompt_name
    if name is None or name in prompts.texts:
        if name is not None and not all(isinstance(each, str) for each in body.input):
            raise InvalidRequest(
                "prompt_name goes with texts, but input has token ids, which are used "
                "unchanged; send texts, or leave prompt_name out.",
                param="prompt_name",
                code="invalid_value",
            )
        return prompts.start(name)
    known = ", ".join(map(repr, prompts.texts)) or "none"
    raise InvalidRequest(
        f"prompt_name: this model has no prompt of the name {name!r:.60}; its prompts: {known}.",
        param="prompt_name",
        code="invalid_value",
    )


def _encode(encoder: InputEncoder, body: EmbeddingsRequest, start: Start) -> list[Input]:
    cut, found = body.truncate_prompt_tokens, list[Input]()
    for number, each in enumerate(body.input):
        name = f"input[{number}]" if len(body.input) > 1 else "input"
        if isinstance(each, str):
            special = body.add_special_tokens
            found += encoder.texts([start.text + each], [name], cut=cut, special=special)
        else:
            found.append(encoder.token_ids(each, name, cut=cut))
    return [each._replace(adapter=start.adapter) for each in found]


def shortened(vectors: Vectors, dimensions: int | None, *, normalizes: bool) -> Vectors:
    """Return the first `dimensions` numbers of each vector, for Matryoshka models.

    If the model normalizes its vectors, the shortened vectors are normalized again.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    vectors = vectors[:, :dimensions]
    if normalizes:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return vectors


def _encoded(vectors: Vectors, model: str, tokens: int, *, as_text: bool) -> bytes:
    rows: Iterable[str | msgspec.Raw] = (
        (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors)
        if as_text
        else (msgspec.Raw(msgspec.json.encode(row.tolist())) for row in vectors)
    )
    return msgspec.json.encode(
        EmbeddingsAnswer(
            model=model,
            data=[EmbeddingAnswer(index=index, embedding=row) for index, row in enumerate(rows)],
            usage=PoolingUsage(tokens, tokens),
        )
    )
