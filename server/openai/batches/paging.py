"""Lists in pages, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from ...core.answers import Answer
from ...core.errors import InvalidRequest

L = TypeVar("L", bound="Page")


class Page(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(kind: type[L], records: Sequence[Any], after: str | None, limit: int) -> L:
    """Return the `limit` records after the record `after`.

    Raise `InvalidRequest` if no record has this id.
    """
    begin = 0
    if after is not None:
        places = [place for place, record in enumerate(records) if record.id == after]
        if not places:
            raise InvalidRequest(
                f"after: there is no {after!r:.80} in this list.",
                param="after",
                code="invalid_value",
            )
        begin = places[0] + 1
    shown = records[begin : begin + limit]
    return kind(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=begin + limit < len(records),
    )
