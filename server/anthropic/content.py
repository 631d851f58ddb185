"""Turns thoughts, texts and calls into content blocks: complete blocks, or events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pydantic_core

from ..parsing.events import Arguments, CallBegins, Event, Text, Thought

# Anthropic's clients send a thought back with its signature. This server ignores signatures.
SIGNATURE = "unsigned"


def _call(name: str) -> dict[str, Any]:
    call_id = f"toolu_{uuid.uuid4().hex[:24]}"
    call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    return {**call, "caller": {"type": "direct"}}


def content_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the content blocks of a complete answer."""
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for event in events:
        kind = blocks[-1]["type"] if blocks else None
        match event:
            case CallBegins(name):
                blocks.append(_call(name))
                texts.append([])
                continue
            case Text() if kind != "text":
                blocks.append({"type": "text", "citations": None})
                texts.append([])
            case Thought() if kind != "thinking":
                blocks.append({"type": "thinking", "signature": SIGNATURE})
                texts.append([])
        texts[-1].append(event.text)
    for block, text in zip(blocks, map("".join, texts), strict=True):
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. If the call is cut off, return the arguments up to there."""
    try:
        found = pydantic_core.from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class ContentStream:
    """The events of a stream for content blocks, one block after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def of(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Text(text):
                if self._open != "text":
                    yield from self._start({"type": "text", "text": "", "citations": None})
                yield self._delta({"type": "text_delta", "text": text})
            case Thought(text):
                if self._open != "thinking":
                    yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegins(name):
                yield from self._start(_call(name))
            case Arguments(text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block, if there is one."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _start(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
