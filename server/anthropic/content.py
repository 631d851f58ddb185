"""Turns thoughts, texts and calls into content blocks: complete blocks, or events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from ..core.answers import Answer
from ..parsing.events import Arguments, CallBegins, Event, Text, Thought, arguments_of

# Anthropic's clients send a thought back with its signature. This server ignores signatures.
SIGNATURE = "unsigned"


class TextContent(Answer, kw_only=True):
    type: Literal["text"] = "text"
    text: str = ""
    citations: None = None


class ThinkingContent(Answer, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class DirectCaller(Answer):
    type: Literal["direct"] = "direct"


class ToolUseContent(Answer, kw_only=True):
    """`caller` is always the model itself."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller


Content = TextContent | ThinkingContent | ToolUseContent


class ContentBlockStart(Answer, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Content


class TextDelta(Answer, kw_only=True):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(Answer, kw_only=True):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(Answer, kw_only=True):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputJsonDelta(Answer, kw_only=True):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(Answer, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Delta


class ContentBlockStop(Answer, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


ContentEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop


def _call(name: str) -> ToolUseContent:
    call_id = f"toolu_{uuid.uuid4().hex[:24]}"
    return ToolUseContent(id=call_id, name=name, input={}, caller=DirectCaller())


def content_of(events: Iterable[Event]) -> list[Content]:
    """Return the content blocks of a complete answer."""
    blocks: list[Content] = []
    texts: list[list[str]] = []
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case CallBegins(name):
                blocks.append(_call(name))
            case Text() if not isinstance(last, TextContent):
                blocks.append(TextContent())
            case Thought() if not isinstance(last, ThinkingContent):
                blocks.append(ThinkingContent(signature=SIGNATURE))
        if len(blocks) > len(texts):
            texts.append([])
        if not isinstance(event, CallBegins):
            texts[-1].append(event.text)
    for block, text in zip(blocks, map("".join, texts), strict=True):
        match block:
            case TextContent():
                block.text = text
            case ThinkingContent():
                block.thinking = text
            case ToolUseContent():
                block.input = arguments_of(text)
    return blocks


class ContentStream:
    """The events of a stream for content blocks, one block after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def of(self, event: Event) -> Iterator[ContentEvent]:
        match event:
            case Text(text):
                if self._open != "text":
                    yield from self._start(TextContent())
                yield ContentBlockDelta(index=self._index, delta=TextDelta(text=text))
            case Thought(text):
                if self._open != "thinking":
                    yield from self._start(ThinkingContent())
                yield ContentBlockDelta(index=self._index, delta=ThinkingDelta(thinking=text))
            case CallBegins(name):
                yield from self._start(_call(name))
            case Arguments(text):
                yield ContentBlockDelta(index=self._index, delta=InputJsonDelta(partial_json=text))

    def close(self) -> Iterator[ContentEvent]:
        """Yield the end of the open block, if there is one."""
        if self._open == "thinking":
            yield ContentBlockDelta(index=self._index, delta=SignatureDelta(signature=SIGNATURE))
        if self._open is not None:
            yield ContentBlockStop(index=self._index)
        self._open = None

    def _start(self, block: Content) -> Iterator[ContentEvent]:
        yield from self.close()
        self._index += 1
        self._open = block.type
        yield ContentBlockStart(index=self._index, content_block=block)
