"""HTTP as bytes, for tests of what no HTTP client would send."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

BODY = b'{"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}'
HEAD = b"Host: test\r\nContent-Type: application/json\r\n"


class Answer(NamedTuple):
    """One response: `rest` is what came behind it."""

    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes

    @property
    def code(self) -> str:
        """The error's code; the error must have OpenAI's shape."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) - {"retry_after"} == {"message", "type", "param", "code"}
        return str(error["code"])


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


def post(path: str = "/v1/completions", body: bytes = BODY, *, more: bytes = b"") -> bytes:
    """A whole request; `more`: further header lines."""
    length = f"Content-Length: {len(body)}\r\n".encode()
    return f"POST {path} HTTP/1.1\r\n".encode() + HEAD + more + length + b"\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes; a reset counts as that."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def parse(data: bytes) -> Answer:
    """The first response in `data`, which has a Content-Length."""
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers["content-length"])
    return Answer(int(first.split()[1]), headers, rest[:length], rest[length:])


def ask(connection: socket.socket, request: bytes) -> Answer:
    """The answer on a connection that stays open."""
    connection.sendall(request)
    return next_answer(connection)


def send_one(port: int, request: bytes) -> bytes:
    with connect(port) as connection:
        connection.sendall(
            request.replace(b"Host: test\r\n", b"Host: test\r\nConnection: close\r\n")
        )
        return read_all(connection)


def next_answer(connection: socket.socket) -> Answer:
    data = b""
    while b"\r\n\r\n" not in data or len((answer := parse(data)).body) < int(
        answer.headers["content-length"]
    ):
        part = connection.recv(65536)
        assert part, f"the server closed after {data!r}"
        data += part
    return answer


def answers(data: bytes) -> Iterator[Answer]:
    while data:
        answer = parse(data)
        yield answer
        data = answer.rest


def send(port: int, *parts: bytes) -> list[Answer]:
    """What is answered to these bytes until the server closes the connection."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        return list(answers(read_all(connection)))


def seconds_until_closed(
    connection: socket.socket, trickle: bytes = b"", every: float = 0.1
) -> tuple[float, bytes]:
    """How long the server keeps the connection, to which `trickle` is sent again and again, and
    what it said.
    """
    began, said = time.monotonic(), b""
    connection.settimeout(every)
    while time.monotonic() < began + 30:
        try:
            part = connection.recv(65536)
            if not part:
                return time.monotonic() - began, said
            said += part
        except TimeoutError:
            with contextlib.suppress(ConnectionError):
                connection.sendall(trickle)
        except ConnectionError:
            return time.monotonic() - began, said
    raise AssertionError("the server keeps the connection")
