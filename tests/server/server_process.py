"""`piecework serve` as a process, for tests that talk to it over HTTP."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx
import psutil

PROMPT = {
    "prompt": [5, 6, 7],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}
IMAGE_FLAGS = ["--num-threads", "1", "--served-model-name", "tiny", "--log-level", "warning"]
FLAGS = [
    "--dtype",
    "float32",
    "--max-total-tokens",
    "2048",
    "--num-threads",
    "1",
    "--served-model-name",
    "tiny",
    "--log-level",
    "warning",
]
NO_PIECES = "--disable-piecewise-cuda-graph"
"""No process that compiles beside every server of a test."""


class ServerProcess:
    """A running `piecework serve`; `finish` ends the wait for its exit and gives exit code and
    output.
    """

    def __init__(
        self, model: str, *flags: str, common: Sequence[str] = FLAGS, launcher: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        served = [
            sys.executable,
            "-m",
            "piecework",
            "serve",
            *(["--model-path", model] if model else []),
            "--port",
            str(self.port),
        ]
        command = [*launcher, *served, *common, *flags]
        if common is FLAGS and not any("cuda-graph" in flag for flag in flags):
            command.append(NO_PIECES)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, seconds: float = 30.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def status(self) -> int:
        """Status of /health, 0 where nothing listens yet."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self, seconds: float = 180.0) -> None:
        """Wait. A busy machine may compile kernels meanwhile."""
        end = time.monotonic() + seconds
        while self.status() != 200:
            if self.process.poll() is not None or time.monotonic() >= end:
                self.process.kill()
                code, out, err = self.finish()
                raise AssertionError(f"not ready, exit code {code}\n{out}\n{err}")
            time.sleep(0.05)

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        helpers = ("grammar_process", "preprocess_process")
        (engine,) = [
            child
            for child in children
            if not any(helper in part for part in child.cmdline() for helper in helpers)
        ]
        return engine

    @contextlib.contextmanager
    def stream(self) -> Iterator[Iterator[str]]:
        """The data of a long answer's events; the first has been read, so that it runs."""
        with self.client.stream("POST", "/v1/completions", json=PROMPT) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(lines)
            yield lines


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(
    model: str, *flags: str, common: Sequence[str] = FLAGS, launcher: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    server = ServerProcess(model, *flags, common=common, launcher=launcher)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()
        server.client.close()


@contextlib.contextmanager
def ready(
    model: str, *flags: str, common: Sequence[str] = FLAGS, launcher: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    with serve(model, *flags, common=common, launcher=launcher) as server:
        server.wait_ready()
        yield server
