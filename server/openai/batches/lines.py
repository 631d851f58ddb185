"""The lines of a batch: its requests and the answers.

A line is `{"custom_id", "method": "POST", "url", "body"}`. Its answer is `{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}`
(https://platform.openai.com/docs/api-reference/batch).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidRequest
from ...http.body import MAX_BODY_BYTES, check_structure
from .records import BatchFault

MAX_LINES = 50_000
_MAX_FAULTS = 100
_MAX_ID = 512
_SAMPLES = ("n", "best_of")


class Line(NamedTuple):
    """One request. `number` counts lines from 1."""

    number: int
    custom_id: str
    body: dict[str, Any]

    @property
    def sequences(self) -> int:
        """Upper limit of the engine's sequences for the line, estimated from the unchecked body."""
        prompt, samples = self.body.get("prompt"), [self.body.get(name) for name in _SAMPLES]
        are_many = isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt)
        count = len(prompt) if isinstance(prompt, list) and are_many else 1
        return count * max([each for each in samples if isinstance(each, int)], default=1)


class _Answered(msgspec.Struct):
    custom_id: str


class LineFault(ValueError):
    """A fault of a line. `code` and `param` are those of the batch's errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def read_lines(path: Path, endpoint: str, skip: Set[str] = frozenset()) -> Iterator[Line]:
    """Yield the requests of a checked file, except those with an id in `skip`."""
    for number, raw in _raw_lines(path):
        line = _parse(number, raw, endpoint)
        if line.custom_id not in skip:
            yield line


def check_lines(path: Path, endpoint: str) -> tuple[int, list[BatchFault]]:
    """Return the number of requests in a file, and its faults."""
    faults: list[BatchFault] = []
    seen: set[str] = set()
    for number, raw in _raw_lines(path):
        try:
            line = _parse(number, raw, endpoint)
            if line.custom_id in seen:
                raise LineFault(
                    "duplicate_custom_id",
                    f"custom_id {line.custom_id!r:.80} is used twice; give each line its own",
                    "custom_id",
                )
            seen.add(line.custom_id)
            if len(seen) > MAX_LINES:
                raise LineFault(
                    "too_many_requests",
                    f"a batch may have at most {MAX_LINES} lines; send several batches",
                )
        except LineFault as error:
            faults.append(BatchFault(error.code, f"{error}.", error.param, number))
            if len(faults) >= _MAX_FAULTS or error.code == "too_many_requests":
                break
    if not seen and not faults:
        faults.append(BatchFault("empty_file", "The file has no lines."))
    return len(seen), faults


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(MAX_BODY_BYTES + 1):
            number += 1
            if raw.strip():
                yield number, raw
            if len(raw) > MAX_BODY_BYTES:
                return  # `_parse` raises an error for this line.


def _parse(number: int, raw: bytes, endpoint: str) -> Line:
    """Return the request of a line. Raise `LineFault`."""
    if len(raw) > MAX_BODY_BYTES:
        raise LineFault("line_too_long", f"a line may have at most {MAX_BODY_BYTES} bytes")
    try:
        check_structure(raw)
    except InvalidRequest as error:
        raise LineFault("line_too_complex", error.message.rstrip(".")) from None
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LineFault("invalid_json_line", f"this line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineFault("invalid_json_line", "this line is not a JSON object")
    custom_id, body = found.get("custom_id"), found.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID:
        raise LineFault(
            "invalid_value", f"custom_id must be a text of 1 to {_MAX_ID} characters", "custom_id"
        )
    if found.get("method") != "POST":
        raise LineFault("invalid_method", "method must be POST", "method")
    if found.get("url") != endpoint:
        raise LineFault("invalid_url", f"url must be the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise LineFault("invalid_value", "body must be the JSON object of a request", "body")
    if body.get("stream") or body.get("background"):
        raise LineFault(
            "invalid_value",
            "a batch cannot stream or run in the background; leave it out",
            "body.stream",
        )
    return Line(number, custom_id, body)


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return a line of the output or of the errors. `body` is JSON."""
    content = msgspec.Raw(msgspec.json.format(body, indent=-1))
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _encode(custom_id, response, None)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the errors for a request that was not sent."""
    return _encode(custom_id, None, {"code": code, "message": message})


def _encode(custom_id: str, response: Any, error: Any) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


def answered_ids(path: Path) -> set[str]:
    """Return the ids of the lines that a batch has written. Cut off half a line at the end."""
    found: set[str] = set()
    if not path.exists():
        return found
    whole = 0
    with open(path, "rb+") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                found.add(msgspec.json.decode(raw, type=_Answered).custom_id)
            except msgspec.DecodeError:
                break
            whole += len(raw)
        file.truncate(whole)
        os.fsync(file.fileno())
    return found
