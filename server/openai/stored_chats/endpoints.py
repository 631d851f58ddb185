"""The endpoints of stored chat completions, below `/v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ...core.answers import BODY_ERRORS, Answer, answers
from ...core.errors import NotFound
from ...core.schemas import Metadata, WireModel
from ...http.body import JsonRoute
from ...media.parts import Detail
from ...serving.state import json_response
from ..chat import ChatCompletion
from .store import StoredChats, Wanted

router = APIRouter()
body_router = APIRouter(route_class=JsonRoute)
_ERRORS = (400, 404, 503)
_METADATA = re.compile(r"metadata\[(.{1,64})\]")
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


class TextPart(Answer, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class ImageUrl(Answer):
    url: str
    detail: Detail


class ImageUrlPart(Answer, kw_only=True):
    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


class StoredMessage(Answer, kw_only=True):
    """A message of the request, with more members if the request had more."""

    is_open = True

    id: str
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    content_parts: Sequence[TextPart | ImageUrlPart] | None


class ChatPage(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[ChatCompletion | msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagePage(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[StoredMessage | msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(Answer, kw_only=True):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


class ChatChange(WireModel):
    """Body of `POST /v1/chat/completions/{completion_id}`."""

    keeps_null: ClassVar[frozenset[str]] = frozenset({"metadata"})

    metadata: Metadata | None


async def _chats_of(request: Request) -> StoredChats:
    found: StoredChats = request.app.state.chats
    return found


ChatsDep = Annotated[StoredChats, Depends(_chats_of)]


@router.get("/v1/chat/completions", responses=answers(ChatPage, errors=_ERRORS))
async def list_chat_completions(
    request: Request,
    chats: ChatsDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: str | None = None,
) -> Response:
    """List the completions that were stored with the same API key, in pages.

    `metadata[NAME]=TEXT` limits the list to completions with this metadata.
    """
    metadata = {
        match[1]: value
        for name, value in request.query_params.items()
        if (match := _METADATA.fullmatch(name))
    }
    found = await chats.listed(Wanted(model, metadata, order))
    return json_response(ChatPage(**_page(found, after, limit)))


@router.get(
    "/v1/chat/completions/{completion_id}", responses=answers(ChatCompletion, errors=_ERRORS)
)
async def retrieve_chat_completion(completion_id: str, chats: ChatsDep) -> Response:
    """Return a stored completion."""
    return json_response(_raw(await chats.get(completion_id)))


@router.get(
    "/v1/chat/completions/{completion_id}/messages",
    responses=answers(MessagePage, errors=_ERRORS),
)
async def list_chat_messages(
    completion_id: str,
    chats: ChatsDep,
    after: str | None = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """List the messages of the request of a stored completion, in pages."""
    messages = await chats.messages(completion_id)
    ordered = messages[::-1] if order == "desc" else messages
    return json_response(MessagePage(**_page(ordered, after, limit)))


@body_router.post(
    "/v1/chat/completions/{completion_id}", responses=answers(ChatCompletion, errors=BODY_ERRORS)
)
async def update_chat_completion(completion_id: str, body: ChatChange, chats: ChatsDep) -> Response:
    """Replace the metadata of a stored completion."""
    return json_response(_raw(await chats.change(completion_id, body.metadata or {})))


@router.delete(
    "/v1/chat/completions/{completion_id}", responses=answers(DeletedChat, errors=_ERRORS)
)
async def delete_chat_completion(completion_id: str, chats: ChatsDep) -> Response:
    """Delete a stored completion."""
    await chats.delete(completion_id)
    return json_response(DeletedChat(id=completion_id))


def _page(found: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Return the members of a page. Raise `NotFound`."""
    if after is not None:
        places = [place for place, one in enumerate(found) if one["id"] == after]
        if not places:
            raise NotFound(
                f"after: there is no {after!r:.100} in this list.", param="after", code="not_found"
            )
        found = found[places[0] + 1 :]
    shown = found[:limit]
    return {
        "data": [_raw(one) for one in shown],
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > limit,
    }


def _raw(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
