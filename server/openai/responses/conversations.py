"""`/v1/conversations`: https://platform.openai.com/docs/api-reference/conversations."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from pydantic import FailFast, Field
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, Answer, answers
from ...core.limits import MAX_MESSAGES
from ...core.schemas import Metadata, WireModel
from ...http.body import JsonRoute, OptionalJsonRoute
from ...serving.state import json_response
from .conversation_store import Conversation, no_item
from .endpoints import After, InputItems, Limit, Order, ResponsesDep, page_of
from .items import ContextItem, InputItem, Item, item_id
from .service import Responses

router = APIRouter()
create_router = APIRouter(route_class=OptionalJsonRoute)
body_router = APIRouter(route_class=JsonRoute)
_ERRORS = (400, 404, 503)
Items = Annotated[list[InputItem], FailFast(), Field(max_length=MAX_MESSAGES)]


class ConversationCreation(WireModel):
    """Body of `POST /v1/conversations`."""

    items: Items = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class ConversationChange(WireModel):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    keeps_null: ClassVar[frozenset[str]] = frozenset({"metadata"})

    metadata: Metadata | None


class ItemsCreation(WireModel):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: Annotated[Items, Field(min_length=1)]


class DeletedConversation(Answer, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


@create_router.post("/v1/conversations", responses=answers(Conversation, errors=BODY_ERRORS))
async def create_conversation(body: ConversationCreation, responses: ResponsesDep) -> Response:
    """Store a conversation, to which responses and clients add items."""
    items = await _kept(body.items, responses)
    created = await responses.ask(responses.conversations.create, body.metadata, items)
    return json_response(created)


@router.get("/v1/conversations/{conversation_id}", responses=answers(Conversation, errors=_ERRORS))
async def retrieve_conversation(conversation_id: str, responses: ResponsesDep) -> Response:
    """Return a conversation without its items."""
    return json_response(await responses.ask(responses.conversations.get, conversation_id))


@body_router.post(
    "/v1/conversations/{conversation_id}", responses=answers(Conversation, errors=BODY_ERRORS)
)
async def update_conversation(
    conversation_id: str, body: ConversationChange, responses: ResponsesDep
) -> Response:
    """Replace the metadata of a conversation."""
    changed = await responses.ask(
        responses.conversations.change, conversation_id, body.metadata or {}
    )
    return json_response(changed)


@router.delete(
    "/v1/conversations/{conversation_id}", responses=answers(DeletedConversation, errors=_ERRORS)
)
async def delete_conversation(conversation_id: str, responses: ResponsesDep) -> Response:
    """Delete a conversation and its items. Its responses stay."""
    await responses.ask(responses.conversations.delete, conversation_id)
    return json_response(DeletedConversation(id=conversation_id))


@router.get(
    "/v1/conversations/{conversation_id}/items", responses=answers(InputItems, errors=_ERRORS)
)
async def list_conversation_items(
    conversation_id: str,
    responses: ResponsesDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """List the items of a conversation in pages. `after` is the id of the item before the page."""
    items = await responses.ask(responses.conversations.items, conversation_id)
    return json_response(page_of(items, after, limit, order))


@body_router.post(
    "/v1/conversations/{conversation_id}/items", responses=answers(InputItems, errors=BODY_ERRORS)
)
async def create_conversation_items(
    conversation_id: str, body: ItemsCreation, responses: ResponsesDep
) -> Response:
    """Add items to the end of a conversation, and return them."""
    items = await _kept(body.items, responses)
    added = await responses.ask(responses.conversations.add, conversation_id, items)
    return json_response(page_of(added, None, len(added), "asc"))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    responses=answers(ContextItem, errors=_ERRORS),
)
async def retrieve_conversation_item(
    conversation_id: str, item_id: str, responses: ResponsesDep
) -> Response:
    """Return one item of a conversation."""
    for item in await responses.ask(responses.conversations.items, conversation_id):
        if item["id"] == item_id:
            return json_response(msgspec.Raw(msgspec.json.encode(item)))
    raise no_item(item_id)


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    responses=answers(Conversation, errors=_ERRORS),
)
async def delete_conversation_item(
    conversation_id: str, item_id: str, responses: ResponsesDep
) -> Response:
    """Remove an item from a conversation."""
    return json_response(
        await responses.ask(responses.conversations.remove, conversation_id, item_id)
    )


async def _kept(items: Sequence[InputItem], responses: Responses) -> list[Item]:
    """Return items as they are stored. Raise `NotFound` or `InvalidRequest`."""
    key = secrets.token_hex(16)
    own = [item.kept(item_id(item.kind, key, number)) for number, item in enumerate(items)]
    return await responses.resolved(own)
