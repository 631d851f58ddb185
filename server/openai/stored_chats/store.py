"""Stores chat completions with the messages of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from ...auth.accounts import current_key
from ...core.errors import NotFound
from ...media.parts import ImagePart
from ..chat import ChatCompletion
from ..requests import ChatCompletionRequest, ChatMessage
from ..stored.database import Row
from ..stored.kept import Kept

_PREFIX = "chatcmpl-"
Stored = dict[str, Any]  # A `ChatCompletion` as decoded JSON.


class Wanted(NamedTuple):
    """What a list of completions is limited to."""

    model: str | None
    metadata: Mapping[str, str]
    order: Literal["asc", "desc"]

    def takes(self, completion: Stored) -> bool:
        """Return whether a completion belongs to the list."""
        known = completion.get("metadata", {})
        return self.model in (None, completion["model"]) and all(
            known.get(name) == value for name, value in self.metadata.items()
        )


class StoredChats:
    """The stored chat completions of a server."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def keeper(self, body: ChatCompletionRequest) -> Callable[[ChatCompletion], None] | None:
        """Return a function that stores the completion of a request, or None if nothing is stored.

        Call this before the messages become a prompt, because they are freed then.
        """
        if not (body.store and self._kept.is_on):
            return None
        messages = msgspec.json.encode([_shown(message) for message in body.messages])
        return partial(self._put, messages, _owner())

    async def listed(self, wanted: Wanted) -> list[Stored]:
        """Return the completions that the current key has stored."""
        if not self._kept.is_on:
            return []
        rows = await self._kept.ask(self._kept.database.listed, _PREFIX, _owner())
        found = [msgspec.json.decode(content) for _, content in rows]
        found = [completion for completion in found if wanted.takes(completion)]
        return found[::-1] if wanted.order == "desc" else found

    async def get(self, completion_id: str) -> Stored:
        """Return a completion. Raise `NotFound`."""
        return _decoded((await self._row(completion_id)).content)

    async def messages(self, completion_id: str) -> list[dict[str, Any]]:
        """Return the messages of the request of a completion. Raise `NotFound`."""
        messages = msgspec.json.decode((await self._row(completion_id)).own)
        return [
            {"id": f"{completion_id}-{number}", **message}
            for number, message in enumerate(messages)
        ]

    async def change(self, completion_id: str, metadata: dict[str, str]) -> Stored:
        """Replace the metadata of a completion. Raise `NotFound`."""
        row = await self._row(completion_id)
        completion = _decoded(row.content)
        completion["metadata"] = metadata
        await self._kept.ask(
            self._kept.database.put,
            completion_id,
            msgspec.json.encode(completion),
            row.own,
            previous=row.previous,
        )
        return completion

    async def delete(self, completion_id: str) -> None:
        """Delete a completion. Raise `NotFound`."""
        await self._row(completion_id)
        await self._kept.ask(self._kept.database.delete, completion_id)

    def _put(self, messages: bytes, owner: str, completion: ChatCompletion) -> None:
        content = msgspec.json.encode(completion)
        put = partial(self._kept.database.put, completion.id, content, messages, previous=owner)
        self._kept.put(len(content) + len(messages), put)

    async def _row(self, completion_id: str) -> Row:
        row = None
        if self._kept.is_on and completion_id.startswith(_PREFIX):
            row = await self._kept.ask(self._kept.database.get, completion_id)
        if row is None or row.previous != _owner():
            raise NotFound(
                f"completion_id: there is no stored chat completion {completion_id!r:.100}; send "
                "store true to have one stored.",
                param="completion_id",
                code="completion_not_found",
            )
        return row


def _owner() -> str:
    """Return the name of the key of the current request."""
    key = current_key.get()
    return "" if key is None else key.name


def _decoded(content: bytes) -> Stored:
    decoded: Stored = msgspec.json.decode(content)
    return decoded


def _shown(message: ChatMessage) -> dict[str, Any]:
    """Return a message as OpenAI's API shows stored messages."""
    content = message.content
    texts = [content] if isinstance(content, str) else [
        part for part in content if isinstance(part, str)
    ]  # fmt: skip
    parts = None if isinstance(content, str) else [_shown_part(part) for part in content]
    optional = {
        "name": message.name,
        "refusal": message.refusal,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [call.model_dump(exclude_none=True) for call in message.tool_calls] or None,
    }
    return {
        "role": message.role,
        "content": "\n".join(texts),
        "content_parts": parts,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _shown_part(part: str | ImagePart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part.url, "detail": part.detail}}
