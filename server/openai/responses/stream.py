"""Streams of responses: named events with sequence numbers, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...collector import Update
from ...errors import ApiError
from ...sse import encode_json
from .answer import Answer

_LAST = {"completed": "completed", "failed": "failed"}


class ResponseWriter:
    """The events of one response. `at_end` is called once, before the last."""

    def __init__(self, answer: Answer, at_end: Callable[[], None]) -> None:
        self._answer = answer
        self._at_end = at_end
        self._count = 0

    def events(self, updates: list[Update]) -> bytes:
        opening = []
        if self._count == 0:
            opening = [self._of_response("created"), self._of_response("in_progress")]
        told = (event for _, output in updates for event in self._answer.push(output))
        return self._written(opening) + self._written(told)

    def end(self) -> bytes:
        self._at_end()
        return self._written([self._of_response(_LAST.get(self._answer.status, "incomplete"))])

    def error(self, error: ApiError) -> bytes:
        self._answer.fail(error)
        return self.end()

    def _of_response(self, kind: str) -> dict[str, Any]:
        return {"type": f"response.{kind}", "response": self._answer.shown()}

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        written = []
        for event in events:
            content = encode_json({**event, "sequence_number": self._count})
            written.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), content))
            self._count += 1
        return b"".join(written)
