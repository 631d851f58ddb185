"""The stored responses and conversations, as rows of the server's database.

    store = ResponseStore(database)
    store.put(response, items)        # items: its own input
    store.history(response["id"])     # all items up to now, its output included

All calls must come from the database's thread. They raise `sqlite3.Error` if the file cannot be
read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidRequest, NotFound
from ...core.limits import MAX_MESSAGES
from ..stored.database import MAX_READ, Database
from .items import ITEM_ID, Item
from .response import LIVE, RESPONSE_ID, ResponseAnswer, ResponseError

_INTERRUPTED = ResponseError(
    "server_error", "The server ended while it made this response; create it again."
)


class _Head(msgspec.Struct):
    id: str
    previous_response_id: str | None
    status: str


class Stored(NamedTuple):
    """A response in the API's format, and its own input."""

    response: dict[str, Any]
    items: list[Item]


class ResponseStore:
    """The stored responses. Those of an earlier server that have not ended become failed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._has_begun = False

    def put(self, response: ResponseAnswer | dict[str, Any], items: Sequence[Item]) -> None:
        """Store a response or its new state."""
        self._begin()
        content = msgspec.json.encode(response)
        head = msgspec.json.decode(content, type=_Head)
        self._database.put(
            head.id,
            content,
            msgspec.json.encode(items),
            previous=head.previous_response_id,
            status=head.status,
        )

    def get(self, response_id: str) -> Stored | None:
        """Return a response, or None if it is not stored."""
        found = self._sized(response_id)
        return found and found[1]

    def delete(self, response_id: str) -> bool:
        """Delete a response. Return False if there is none."""
        return response_id.startswith(RESPONSE_ID) and self._database.delete(response_id)

    def history(self, response_id: str) -> list[Item]:
        """Return input and output of a response and all previous ones, oldest first.

        Raise `NotFound`, or `InvalidRequest` if the conversation is too long.
        """
        turns: list[Stored] = []
        following: str | None = response_id
        left = MAX_READ
        while following is not None:
            found = self._sized(following)
            if found is None:
                where = "" if following == response_id else f", which {response_id} goes on from,"
                raise NotFound(
                    f"The previous response {following!r:.100}{where} is not stored; send the "
                    "whole conversation as input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            size, turn = found
            left -= size
            if left < 0 or len(turns) >= MAX_MESSAGES:
                raise too_long("previous_response_id")
            if turn.response["status"] not in ("completed", "incomplete"):
                raise InvalidRequest(
                    f"The previous response {following!r:.100} is {turn.response['status']}; "
                    "name one that is completed.",
                    param="previous_response_id",
                    code="previous_response_not_completed",
                )
            turns.append(turn)
            following = turn.response["previous_response_id"]
        self._database.touch(turn.response["id"] for turn in turns)
        return [
            item for turn in reversed(turns) for item in (*turn.items, *turn.response["output"])
        ]

    def items(self, ids: Iterable[str]) -> dict[str, Item]:
        """Return items of stored responses by their ids. Missing items are left out.

        Raise `InvalidRequest` if the responses are too long.
        """
        keys = {match[1] for item_id in ids if (match := ITEM_ID.fullmatch(item_id))}
        found: dict[str, Item] = {}
        left = MAX_READ
        for key in keys:
            if (sized := self._sized(f"{RESPONSE_ID}{key}")) is not None:
                left -= sized[0]
                if left < 0:
                    raise too_long("input")
                turn = sized[1]
                found |= {item["id"]: item for item in (*turn.items, *turn.response["output"])}
        return found

    def _sized(self, response_id: str) -> tuple[int, Stored] | None:
        """Return a response and its size in bytes."""
        self._begin()
        if not response_id.startswith(RESPONSE_ID):
            return None
        row = self._database.get(response_id)
        return row and (
            row.size,
            Stored(msgspec.json.decode(row.content), msgspec.json.decode(row.own)),
        )

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._database.end_unfinished(LIVE, _INTERRUPTED)


def too_long(param: str) -> InvalidRequest:
    """The error of a stored conversation that one request may not load."""
    return InvalidRequest(
        f"{param}: the stored conversation is too long; send the part that matters as input.",
        param=param,
        code="context_length_exceeded",
    )
