"""More connections than there may be: those that ask for nothing give way, and monitoring is always
answered.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from raw_http import BODY, ask, connect, parse, post, read_all, send_one
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model

MOST = 6
"""Connections of the small server."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama"))
    with ready(model, "--max-connections", str(MOST), "--max-queued-requests", "100") as server:
        yield server


@contextlib.contextmanager
def open_many(port: int, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(stack.enter_context(connect(port)))
            with contextlib.suppress(ConnectionError):
                connections[-1].sendall(data)
        time.sleep(0.3)
        yield connections


@pytest.mark.parametrize("sent", [b"", b"GET /hea"], ids=["nothing", "half a line"])
def test_connections_without_a_request_give_way(small: ServerProcess, sent: bytes) -> None:
    with open_many(small.port, 200, sent) as connections:
        assert parse(send_one(small.port, post())).status == 200
        assert (
            parse(send_one(small.port, b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")).status == 200
        )
        assert read_all(connections[0]) == b""


def test_where_all_are_busy_monitoring_is_answered_and_everything_else_refused(
    small: ServerProcess,
) -> None:
    half = post(body=BODY)[:-1]
    with open_many(small.port, 100, half) as connections:
        refused = parse(send_one(small.port, post()))
        assert (refused.status, refused.code) == (503, "too_busy")
        assert refused.headers["connection"] == "close" and "retry-after" in refused.headers
        for path in (b"/health", b"/live", b"/ready", b"/metrics"):
            assert (
                b"200 OK"
                in send_one(small.port, b"GET %s HTTP/1.1\r\nHost: test\r\n\r\n" % path)[:20]
            )
        for connection in connections[:MOST]:
            assert ask(connection, BODY[-1:]).status == 200
    assert parse(send_one(small.port, post())).status == 200


def test_the_reserve_cannot_be_kept_by_bodies(small: ServerProcess) -> None:
    half = b"GET /health HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\n"
    with open_many(small.port, MOST, post()[:-1]), open_many(small.port, 100, half):
        assert (
            parse(send_one(small.port, b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")).status == 200
        )
