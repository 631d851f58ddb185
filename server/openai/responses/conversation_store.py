"""The stored conversations: their metadata and their items, one row for each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from ...core.answers import Answer
from ...core.errors import InvalidRequest, NotFound
from ...core.limits import MAX_MESSAGES
from ..stored.database import MAX_READ, Database
from .items import Item, item_id
from .store import too_long

_PREFIX = "conv_"


class Conversation(Answer, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationStore:
    """The conversations of a server.

    All calls must come from the database's thread. `param` names the parameter with the id in
    errors.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, metadata: dict[str, str], items: Sequence[Item]) -> Conversation:
        """Store a new conversation. Raise `InvalidRequest` if it is too long."""
        conversation = Conversation(
            id=_PREFIX + secrets.token_hex(16), created_at=int(time.time()), metadata=metadata
        )
        self._put(conversation, _distinct([], items))
        return conversation

    def get(self, conversation_id: str, param: str = "conversation_id") -> Conversation:
        """Return a conversation. Raise `NotFound`."""
        return self._row(conversation_id, param)[0]

    def items(self, conversation_id: str, param: str = "conversation_id") -> list[Item]:
        """Return the items, oldest first, and mark the conversation as used. Raise `NotFound`."""
        items = self._row(conversation_id, param)[1]
        self._database.touch([conversation_id])
        return items

    def change(self, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        """Replace the metadata. Raise `NotFound`."""
        conversation, items = self._row(conversation_id)
        conversation.metadata = metadata
        self._put(conversation, items)
        return conversation

    def add(self, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items at the end and return them. An id that is taken is replaced.

        Raise `NotFound`, or `InvalidRequest` if the conversation becomes too long.
        """
        conversation, known = self._row(conversation_id)
        found = _distinct(known, items)
        self._put(conversation, found)
        return found[len(known) :]

    def remove(self, conversation_id: str, removed: str) -> Conversation:
        """Remove an item. Raise `NotFound`."""
        conversation, items = self._row(conversation_id)
        left = [item for item in items if item["id"] != removed]
        if len(left) == len(items):
            raise no_item(removed)
        self._put(conversation, left)
        return conversation

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation and its items. Raise `NotFound`."""
        self._row(conversation_id)
        self._database.delete(conversation_id)

    def _row(
        self, conversation_id: str, param: str = "conversation_id"
    ) -> tuple[Conversation, list[Item]]:
        row = self._database.get(conversation_id) if conversation_id.startswith(_PREFIX) else None
        if row is None:
            raise NotFound(
                f"{param}: there is no stored conversation {conversation_id!r:.100}.",
                param=param,
                code="conversation_not_found",
            )
        conversation = msgspec.json.decode(row.content, type=Conversation)
        return conversation, msgspec.json.decode(row.own)

    def _put(self, conversation: Conversation, items: Sequence[Item]) -> None:
        own = msgspec.json.encode(items)
        if len(own) > MAX_READ or len(items) > MAX_MESSAGES:
            raise too_long("items")
        if not self._database.put(conversation.id, msgspec.json.encode(conversation), own):
            raise InvalidRequest(
                "items: the conversation is larger than all that this server stores "
                "(--responses-store-size); create a new one.",
                param="items",
                code="conversation_too_large",
            )


def _distinct(known: Sequence[Item], items: Sequence[Item]) -> list[Item]:
    """Return all items, with a new id for each of `items` whose id is taken."""
    taken = {item["id"] for item in known}
    found = list(known)
    for number, item in enumerate(items):
        if item["id"] in taken:
            item = {**item, "id": item_id(item["type"], secrets.token_hex(16), number)}
        taken.add(item["id"])
        found.append(item)
    return found


def no_item(item: str) -> NotFound:
    """The error of a conversation that does not have this item."""
    return NotFound(
        f"item_id: the conversation has no item {item!r:.100}.",
        param="item_id",
        code="item_not_found",
    )
