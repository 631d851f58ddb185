"""Server-sent events: sequences in, one HTTP response out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..runtime.tokenizer.output_processor import GenerationOutput
from .collector import SequenceGroup, Update, unless_client_goes
from .errors import ClientGone, as_api_error
from .metrics import Metrics
from .openai.generation import Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + _encode(content) + b"\n\n"


class EventWriter(Protocol):
    """Turns what is new about sequences into events."""

    def events(self, updates: list[Update]) -> bytes: ...

    def end(self) -> bytes:
        """What follows once all sequences have ended."""
        ...


class EventStream(Response):
    """The response that runs `group` and sends its events.

    Its status line waits for the first output, so that an error before that is an HTTP error; a
    later one becomes the last event. A client that goes away, at whatever moment, ends the
    sequences.
    """

    media_type = "text/event-stream"

    def __init__(self, group: SequenceGroup, writer: EventWriter, metrics: Metrics) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._group = group
        self._writer = writer
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_client_goes(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with self._group:
            updates = await self._group.next()
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                while updates:
                    await send(
                        {
                            "type": "http.response.body",
                            "body": self._writer.events(updates),
                            "more_body": True,
                        }
                    )
                    updates = await self._group.next()
                last = self._writer.end()
            except Exception as error:
                known = as_api_error(error)
                self._metrics.count_error(known.type)
                last = event(known.body())
            await send({"type": "http.response.body", "body": last, "more_body": False})


class ChunkWriter(ABC):
    """Events of OpenAI's shape: chunks that begin with `head` and hold one choice each, then the
    usage, then `[DONE]`.
    """

    def __init__(
        self, head: dict[str, Any], usage: Usage, *, include_usage: bool, continuous_usage: bool
    ) -> None:
        self._head = head
        self._usage = usage
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choices that come before any token of sequence `index` is told of, the first time
        that it is asked for.
        """
        return []

    @abstractmethod
    def choices(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """The choices that tell what is new about sequence `index`."""

    def events(self, updates: list[Update]) -> bytes:
        chunks = []
        for index, output in updates:
            self._usage.add_prompt(index, output)
            chunks += [event(self._chunk(choice)) for choice in self.opening(index)]
            self._usage.add_tokens(output)
            chunks += [event(self._chunk(choice)) for choice in self.choices(index, output)]
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage.as_dict()}) + DONE

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        if self._continuous_usage:
            return {**self._head, "choices": [choice], "usage": self._usage.as_dict()}
        if self._include_usage:
            return {**self._head, "choices": [choice], "usage": None}
        return {**self._head, "choices": [choice]}
