"""`POST /v1/classify`, as in vLLM: the probability of each label of a text."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from ..core.answers import BODY_ERRORS, Answer, answers
from ..core.errors import InvalidRequest
from ..http.body import JsonRoute
from ..serving.state import json_response
from .inputs import Input, InputEncoder
from .requests import ClassifyRequest
from .state import PoolingServingDep, PoolingUsage

router = APIRouter(route_class=JsonRoute)


class ClassifyResult(Answer):
    """`probs` has a number for each label. `label` is the label with the largest one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyResult]
    usage: PoolingUsage


@router.post("/v1/classify", responses=answers(ClassifyAnswer, errors=BODY_ERRORS))
@router.post("/classify", responses=answers(ClassifyAnswer, errors=BODY_ERRORS))
async def classify(body: ClassifyRequest, serving: PoolingServingDep) -> Response:
    """Return the label of each text or pair of texts, and the probabilities of all labels."""
    serving.check_model(body.model)
    labels = serving.info.labels
    if not labels:
        raise InvalidRequest(
            "This server has an embedder, which has no labels; send texts to /v1/embeddings.",
            code="not_a_classifier",
        )
    serving.check_room(len(body.input), "input")
    characters = sum(len(text) for each in body.input for text in each)
    inputs = await serving.encode(characters, partial(_encode, serving.inputs, body))
    rid = f"classify-{uuid.uuid4().hex}"
    shares = await serving.pool(rid, inputs)
    tokens = sum(len(each.token_ids) for each in inputs)
    return json_response(
        ClassifyAnswer(
            id=rid,
            created=int(time.time()),
            model=serving.model_name,
            data=[
                ClassifyResult(index, labels[int(row.argmax())], row.tolist(), len(labels))
                for index, row in enumerate(shares)
            ],
            usage=PoolingUsage(tokens, tokens),
        )
    )


def _encode(encoder: InputEncoder, body: ClassifyRequest) -> list[Input]:
    cut, found = body.truncate_prompt_tokens, list[Input]()
    for number, each in enumerate(body.input):
        name = f"input[{number}]" if len(body.input) > 1 else "input"
        if len(each) == 1:
            found += encoder.texts(each, [name], cut=cut)
        else:
            names = f"{name}[0]", f"{name}[1]"
            found += encoder.pairs([(each[0], each[1])], [names], cut=cut)
    return found
