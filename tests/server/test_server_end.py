"""A server that is told to stop ends in time, whatever its threads, its clients and its event loop
do.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import FLAGS, NO_PIECES, free_port
from tiny_models import make_tiny_model

DRAIN = 1.0
"""For a machine that others use too."""

BUSY_THREADS = """
from piecework.server.serving.state import TextThreads

run = TextThreads.run

def work():
    print("a thread is busy", file=sys.stderr, flush=True)
    time.sleep(300)

TextThreads.run = lambda self, *plain, **settings: run(self, work)
"""
STUCK_LOOP = """
from piecework.server.engine.client import EngineClient

async def stop(self, **settings):
    time.sleep(300)

EngineClient.stop = stop
"""
STUCK_INTERPRETER = """
import ctypes
from piecework.server.engine.client import EngineClient

async def stop(self, **settings):
    ctypes.PyDLL(None).sleep(300)  # holds the lock that every thread needs

EngineClient.stop = stop
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1))


@contextlib.contextmanager
def server_with(
    fault: str, model: str, folder: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server with this in its web process, once it is ready."""
    script = folder / "server.py"
    script.write_text(
        "import sys, time\nfrom piecework.cli.main import "
        f"main\n{fault}\nsys.exit(main(sys.argv[1:]))\n"
    )
    port = free_port()
    command = ["serve", "--model-path", model, "--port", str(port), *FLAGS, *flags]
    server = subprocess.Popen(
        [sys.executable, str(script), *command, "--drain-timeout", str(DRAIN)],
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []
    try:
        for _ in range(600):
            assert server.poll() is None
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.1)
        children = psutil.Process(server.pid).children(recursive=True)
        yield server, port
        assert not psutil.wait_procs(children, timeout=20)[1], (
            "the engine, or what compiles for it, is still there"
        )
    finally:
        server.kill()
        server.communicate()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def post(port: int, body: str, path: str) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body.encode())
    return client


def stop(server: subprocess.Popen[str]) -> None:
    """Without its bound, a drain would not end."""
    server.send_signal(signal.SIGTERM)
    server.wait(60)


def test_a_server_that_is_killed_leaves_no_process(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the one that compiles for the engine."""
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    with server_with("", model, tmp_path) as (server, _):
        end = time.monotonic() + 60
        while len(family := psutil.Process(server.pid).children(recursive=True)) < 2:
            assert time.monotonic() < end, "nothing is compiled"
            time.sleep(0.02)
        server.kill()
        assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_checker_of_grammars_is_replaced_and_ends_with_the_server(
    model: str, tmp_path: Path
) -> None:
    with server_with("", model, tmp_path, NO_PIECES) as (server, port):
        first = checker_after_a_grammar(server, port, "start: /a+/")
        first.kill()
        second = checker_after_a_grammar(server, port, "start: /b+/")
        assert second != first
        server.kill()
        assert not psutil.wait_procs([second], timeout=20)[1]


def checker_after_a_grammar(
    server: subprocess.Popen[str], port: int, grammar: str
) -> psutil.Process:
    """The process that checked `grammar`, which the server answered."""
    body = {"prompt": "Hi", "max_tokens": 1, "guided_grammar": grammar}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (checker,) = [
        child
        for child in psutil.Process(server.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
        and any("grammar_process" in part for part in child.cmdline())
    ]
    return checker


@pytest.mark.slow
def test_threads_that_tokenise_for_clients_that_are_gone_are_not_waited_for(
    model: str, tmp_path: Path
) -> None:
    with server_with(BUSY_THREADS, model, tmp_path, NO_PIECES) as (server, port):
        clients = [post(port, f'{{"prompt": "{"a" * 100_000}"}}', "/tokenize") for _ in range(8)]
        assert server.stderr is not None
        assert any("a thread is busy" in line for line in server.stderr)
        stop(server)
        assert server.returncode == 0
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param(STUCK_LOOP, 0, marks=pytest.mark.slow),
        pytest.param(STUCK_INTERPRETER, -signal.SIGALRM, marks=pytest.mark.slow),
    ],
)
def test_a_process_in_which_nothing_goes_on_any_more_ends_too(
    fault: str, code: int, model: str, tmp_path: Path
) -> None:
    with server_with(fault, model, tmp_path, NO_PIECES) as (server, _):
        stop(server)
        assert server.returncode == code
