"""`/v1/responses` and the paths below it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, Answer, answers
from ...core.errors import NotFound
from ...http.body import JsonRequest, JsonRoute
from ...serving.collector import Collector, generate_all
from ...serving.sse import EventStream
from ...serving.state import Serving, ServingDep, json_response
from ..conversation import chat_prompt
from .chat import begin_within, chat_of, wire_names
from .items import ContextItem, Item, characters, item_id
from .live import LiveResponse
from .mcp_loop import ToolLoop, check_servers
from .mcp_tools import McpTool
from .output import ResponseEvent
from .requests import ResponsesRequest
from .response import RESPONSE_ID, ResponseAnswer, new_id
from .service import Responses
from .stream import ErrorEvent, JobStream, ResponseEvents, ResponseWriter

logger = logging.getLogger(__name__)

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_FIRST_INPUT = 2**15  # Number of the first input item. Output items are numbered from 0.


class DeletedResponse(Answer, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokenCount(Answer, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItems(Answer, kw_only=True):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: Sequence[ContextItem | msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def _responses_of(request: Request) -> Responses:
    found: Responses = request.app.state.responses
    return found


After = str | None
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
ResponsesDep = Annotated[Responses, Depends(_responses_of)]


@body_router.post(
    "/v1/responses",
    responses=answers(ResponseAnswer, stream=ResponseEvent | ErrorEvent, errors=BODY_ERRORS),
)
async def create_response(
    body: ResponsesRequest, request: JsonRequest, serving: ServingDep, responses: ResponsesDep
) -> Response:
    """Answer a conversation of items."""
    response_id = new_id()
    own, items = await context_of(body, responses, response_id)
    size = request.size + characters(items)
    if body.mcp_tools and responses.mcp_allowed.hosts:
        return await _run_tools(body, own, items, serving, responses, response_id, size)
    conversation = await begin_within(serving, body, items, response_id, size=size)
    is_stored = body.store and responses.keeps
    answer = LiveResponse(serving, body, response_id, conversation, is_stored=is_stored, size=size)
    collector = Collector(serving, conversation.requests)
    if body.background:
        job = responses.start(answer, own, collector, body.stream)
        if body.stream:
            return JobStream(job, 0, responses.keep_alive)
        return json_response(answer.as_answer())
    # Free the items, because Python objects take many times their text and the answer may take
    # minutes.
    is_kept = is_stored or body.conversation is not None
    packed = msgspec.json.encode(own if is_kept else [])
    body.input.clear()
    del own, items

    def keep() -> None:
        responses.keep(answer, msgspec.json.decode(packed))

    if body.stream:
        writer = ResponseWriter(answer, keep)
        return EventStream(collector, writer, serving)
    (output,) = await generate_all(serving, conversation.requests)
    for _ in answer.push(output):
        pass
    keep()
    return json_response(answer.as_answer())


async def _run_tools(
    body: ResponsesRequest,
    own: list[Item],
    items: list[Item],
    serving: Serving,
    responses: Responses,
    response_id: str,
    size: int,
) -> Response:
    """Answer a request whose tools MCP servers run."""
    serving.check_model(body.model)
    check_servers(body, responses.mcp_allowed)
    responses.check_jobs(size, body.stream)
    is_stored = body.store and responses.keeps
    answer = LiveResponse(serving, body, response_id, None, is_stored=is_stored, size=size)
    encoder = ResponseEvents(answer) if body.stream else None
    body.input.clear()
    loop = ToolLoop(serving, responses.mcp_allowed, body, own, items, answer, encoder)
    job = responses.start_job(loop)
    if body.stream:
        return JobStream(job, 0, responses.keep_alive)
    if not body.background:
        assert job.task is not None
        await job.task
    return json_response(answer.as_answer())


async def context_of(
    body: ResponsesRequest, responses: Responses, response_id: str
) -> tuple[list[Item], list[Item]]:
    """Return the response's own input, and all items up to it. Raise `InvalidRequest`."""
    responses.check(body)
    left_out = body.left_out
    if body.mcp_tools and not responses.mcp_allowed.hosts:
        left_out = [*left_out, "mcp (--mcp-allow)"]
        body.tools[:] = [tool for tool in body.tools if not isinstance(tool, McpTool)]
    if left_out:
        logger.info(
            "/v1/responses: tools that no client runs are left out: %s", ", ".join(left_out)
        )
    key = response_id.removeprefix(RESPONSE_ID)
    own = [
        item.kept(item_id(item.kind, key, number))
        for number, item in enumerate(body.input, start=_FIRST_INPUT)
    ]
    return await responses.context(body, own)


@body_router.post(
    "/v1/responses/input_tokens", responses=answers(InputTokenCount, errors=BODY_ERRORS)
)
async def count_input_tokens(
    body: ResponsesRequest, request: JsonRequest, serving: ServingDep, responses: ResponsesDep
) -> Response:
    """Count the tokens of the prompt of a response."""
    serving.check_model(body.model)
    _, items = await context_of(body, responses, new_id())
    with wire_names():
        prompt = await chat_prompt(
            serving,
            chat_of(body, items),
            size=request.size,
            add_special_tokens=False,
            counting=True,
        )
    return json_response(InputTokenCount(input_tokens=len(prompt.ids)))


@router.get(
    "/v1/responses/{response_id}",
    responses=answers(ResponseAnswer, stream=ResponseEvent | ErrorEvent, errors=(400, 404, 503)),
)
async def retrieve_response(
    response_id: str,
    responses: ResponsesDep,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
) -> Response:
    """Return a stored response, or a background response in its current state.

    `stream` returns the events of a streamed background response after number `starting_after`.
    """
    if stream:
        begin = 0 if starting_after is None else starting_after + 1
        return JobStream(await responses.followed(response_id), begin, responses.keep_alive)
    return _encoded((await responses.find(response_id)).response)


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse, errors=(404, 503)))
async def delete_response(response_id: str, responses: ResponsesDep) -> Response:
    """Delete a response. A background response is cancelled."""
    await responses.delete(response_id)
    return json_response(DeletedResponse(id=response_id))


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses=answers(ResponseAnswer, errors=(400, 404, 503)),
)
async def cancel_response(response_id: str, responses: ResponsesDep) -> Response:
    """Cancel a background response. A response that has ended stays unchanged."""
    return _encoded(await responses.cancel(response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=answers(InputItems, errors=(400, 404, 503)),
)
async def list_input_items(
    response_id: str,
    responses: ResponsesDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List the input items of a response, those of previous turns included, in pages.

    `after` is the id of the item before the page.
    """
    return json_response(page_of(await responses.input_items(response_id), after, limit, order))


def page_of(items: Sequence[Item], after: str | None, limit: int, order: Order) -> InputItems:
    """Return a page of items, which are given oldest first. Raise `NotFound`."""
    # If a client sent the same id twice, keep one item. Otherwise paging would not end.
    items = [*{item["id"]: item for item in items}.values()]
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise NotFound(
                f"after: there is no item {after!r:.100}.", param="after", code="not_found"
            )
        items = items[places[0] + 1 :]
    page = items[:limit]
    return InputItems(
        data=[msgspec.Raw(msgspec.json.encode(item)) for item in page],
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )


def _encoded(response: dict[str, Any]) -> Response:
    """Return a stored response, which is a decoded `ResponseAnswer`."""
    return Response(msgspec.json.encode(response), media_type="application/json")
