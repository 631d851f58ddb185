"""What `http/protocol.py` takes of uvicorn beyond its documented interface is there; and
connections take no file from the rest.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from http_fixtures import make_app
from raw_http import connect, parse, post, read_all
from scripted_engine import ScriptedEngine
from server_process import ready
from tiny_models import make_tiny_model
from uvicorn.protocols.http.httptools_impl import (
    FlowControl,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from piecework.server.config.http_limits import HttpLimits, room_for_connections
from piecework.server.http.old_client import send_without_chunks
from piecework.server.http.protocol import BoundedHttpProtocol
from piecework.server.launch import http_server


def attributes(source: Any, owner: str = "self") -> set[str]:
    """The attributes of `owner`, an expression, that a class or function reads, calls or sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner
    }


def test_uvicorn_has_every_name_that_is_used_of_it() -> None:
    ours: Any = BoundedHttpProtocol
    theirs = set(dir(HttpToolsProtocol)) | attributes(HttpToolsProtocol)
    own = vars(ours).keys() | attributes(ours.__init__)
    missing = (attributes(ours) - own | attributes(ours, "super()")) - theirs
    missing |= {
        f"flow.{name}"
        for name in attributes(ours, "self.flow") - set(dir(FlowControl)) - attributes(FlowControl)
    }
    of_cycles = set(dir(RequestResponseCycle)) | attributes(RequestResponseCycle)
    missing |= {
        f"cycle.{name}"
        for source, owner in (
            (ours, "self.cycle"),
            (ours, "cycle"),
            (send_without_chunks, "cycle"),
        )
        for name in attributes(source, owner) - of_cycles
    }
    assert not missing, (
        f"uvicorn {uvicorn.__version__} lacks what http/protocol.py builds on: {sorted(missing)}"
    )


def test_a_flood_of_connections_leaves_files_for_the_server(tmp_path: Path) -> None:
    few_files = ["sh", "-c", 'ulimit -n 160; exec "$@"', "sh"]
    model = str(make_tiny_model(tmp_path, "llama"))
    with ready(model, "--log-level", "warning", launcher=few_files) as server:
        process = psutil.Process(server.process.pid)
        connections = [connect(server.port) for _ in range(400)]
        try:
            with connect(server.port) as another:
                another.sendall(post(more=b"Connection: close\r\n"))
                assert parse(read_all(another)).status == 200
            before = sum(process.cpu_times()[:2])
            assert server.status() == 200 and process.num_fds() < 150
            process.cpu_percent()
            assert process.cpu_percent(0.5) < 50, "the server spins"
            assert sum(process.cpu_times()[:2]) - before < 5
            # An engine that ends needs new sockets.
            server.engine().kill()
            server.wait_ready()
        finally:
            for connection in connections:
                connection.close()
        server.process.terminate()
        assert "may open files for 80 only (ulimit -n)" in server.finish()[2]


def test_a_machine_without_limits_of_files_bounds_connections_by_the_flag_alone(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert room_for_connections() is None
    with caplog.at_level(logging.WARNING):
        http_server(make_app(scripted), HttpLimits(max_connections=10**9))
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", 0),
        ("max_header_bytes", 100),
        ("max_header_count", 0),
        ("max_unfinished_bodies", 0),
        ("min_transfer_rate", -1),
        ("timeout_header", 0.0),
        ("timeout_body", float("inf")),
        ("timeout_write", float("nan")),
        ("timeout_keep_alive", -1.0),
    ],
)
def test_a_limit_that_cannot_be_is_told_by_its_flag(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be "):
        HttpLimits(**settings)
