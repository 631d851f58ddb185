"""`/v1/responses` and what lies below it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from ...answers import BODY_ERRORS, answers
from ...collector import Collector, generate_all
from ...http.body import JsonRequest, JsonRoute
from ...sse import EventStream
from ...state import ServingDep, json_response
from ..conversation import begin
from .answer import RESPONSE_ID, Answer, new_id
from .answers import ResponseAnswer, ResponseEvent
from .chat import chat_of, wire_names
from .items import item_id
from .protocol import ResponsesRequest
from .stream import ResponseWriter

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/responses",
    responses=answers(ResponseAnswer, stream=ResponseEvent, errors=BODY_ERRORS),
)
async def create_response(
    body: ResponsesRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a conversation of items."""
    response_id = new_id()
    key = response_id.removeprefix(RESPONSE_ID)
    items = [
        item.kept(item_id(item.kind, key, number))
        for number, item in enumerate(body.input, start=2**15)
    ]
    with wire_names():
        conversation = await begin(serving, chat_of(body, items), response_id, size=request.size)
    answer = Answer(serving, body, response_id, conversation, is_stored=False)
    if body.stream:
        writer = ResponseWriter(answer, lambda answer: None)
        return EventStream(Collector(serving, conversation.requests), writer, serving.metrics)
    (output,) = await generate_all(serving, conversation.requests)
    for _ in answer.push(output):
        pass
    return json_response(answer.shown())
