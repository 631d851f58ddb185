"""A server for one chat, on a free port and with its own API key."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

from .client import ChatClient, Unavailable

_LONGEST_START = 3600.0  # Seconds, because a model may have to be downloaded first.
_LONGEST_END = 10.0  # Seconds.
_LAST_BYTES = 4096
_OURS = ("PIECEWORK_API_KEY", "PIECEWORK_API_KEY_FILE", "PIECEWORK_HOST", "PIECEWORK_PORT")


@contextlib.contextmanager
def started(model: str, show: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Start a server of `model`, and yield its URL and key when it is ready. Stop it at the end.

    `show` is called with progress texts, and with an empty text at the end. Raises `ValueError`
    with the server's last line if it does not become ready.
    """
    key = secrets.token_urlsafe(24)
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment["PIECEWORK_API_KEY"] = key
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", __package__.partition(".")[0], "serve", "--model-path", model]
    with tempfile.TemporaryFile() as log, _ended_by_signals():
        # In its own process session, so that Ctrl-C stops an answer and not the server.
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                for seconds in ChatClient(url, key).wait(_LONGEST_START):
                    if process.poll() is not None:
                        raise ValueError(f"the server of {model} ended: {_last_line(log)}")
                    show(f"starting {model}: {seconds:.0f} s")
            except Unavailable as error:
                raise ValueError(f"the server of {model} is not ready: {error}") from None
            finally:
                show("")
            yield url, key
        finally:
            # The server waits for requests after the first signal, but not after the second.
            for _ in range(2):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LONGEST_END / 2)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP (a closed terminal) into `SystemExit`."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _last_line(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
