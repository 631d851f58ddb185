"""`/v1/responses` and what lies below it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...answers import BODY_ERRORS, answers
from ...collector import Collector, generate_all
from ...errors import NotFound
from ...http.body import JsonRequest, JsonRoute
from ...sse import EventStream
from ...state import ServingDep, json_response
from ..conversation import begin
from .answer import RESPONSE_ID, Answer, new_id
from .answers import DeletedResponse, InputItems, ResponseAnswer, ResponseEvent
from .chat import chat_of, wire_names
from .items import item_id
from .protocol import ResponsesRequest
from .service import Responses
from .stream import ResponseWriter

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_FIRST_INPUT = 2**15
"""Input items are numbered from here, output items from 0."""


async def _responses_of(request: Request) -> Responses:
    found: Responses = request.app.state.responses
    return found


ResponsesDep = Annotated[Responses, Depends(_responses_of)]


@body_router.post(
    "/v1/responses",
    responses=answers(ResponseAnswer, stream=ResponseEvent, errors=BODY_ERRORS),
)
async def create_response(
    body: ResponsesRequest, request: JsonRequest, serving: ServingDep, responses: ResponsesDep
) -> Response:
    """Answer a conversation of items."""
    response_id = new_id()
    key = response_id.removeprefix(RESPONSE_ID)
    own = [
        item.kept(item_id(item.kind, key, number))
        for number, item in enumerate(body.input, start=_FIRST_INPUT)
    ]
    responses.check(body)
    own, items = await responses.context(body, own)
    with wire_names():
        conversation = await begin(serving, chat_of(body, items), response_id, size=request.size)
    is_stored = body.store and responses.keeps
    answer = Answer(
        serving, body, response_id, conversation, is_stored=is_stored, size=request.size
    )
    collector = Collector(serving, conversation.requests)
    if body.background:
        responses.start(answer, own, collector)
        return json_response(answer.shown())
    if body.stream:
        writer = ResponseWriter(answer, lambda: responses.keep(answer, own))
        return EventStream(collector, writer, serving.metrics)
    (output,) = await generate_all(serving, conversation.requests)
    for _ in answer.push(output):
        pass
    responses.keep(answer, own)
    return json_response(answer.shown())


@router.get("/v1/responses/{response_id}", responses=answers(ResponseAnswer, errors=(404, 503)))
async def retrieve_response(response_id: str, responses: ResponsesDep) -> Response:
    """A stored response, or one of the background as it is now."""
    return json_response((await responses.find(response_id)).response)


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse, errors=(404, 503)))
async def delete_response(response_id: str, responses: ResponsesDep) -> Response:
    """Forget a response; one of the background ends."""
    await responses.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses=answers(ResponseAnswer, errors=(400, 404, 503)),
)
async def cancel_response(response_id: str, responses: ResponsesDep) -> Response:
    """End a response of the background; one that has ended stays as it is."""
    return json_response(await responses.cancel(response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=answers(InputItems, errors=(400, 404, 503)),
)
async def list_input_items(
    response_id: str,
    responses: ResponsesDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """What a response was made from, former turns included, a page at a time. `after`: the id of an
    item that the page follows.
    """
    items = await responses.input_items(response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise NotFound(
                f"after: the response has no item {after!r:.100}.", param="after", code="not_found"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )
