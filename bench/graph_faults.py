"""Cold starts with a compiler that fails, and the gaps that a streaming client sees meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .client import Client, RequestFailed
from .target import Target

_STREAM = {
    "prompt": [5, 6, 7],
    "max_tokens": 256,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
_READY_SECONDS = 300.0
# Seconds from the end of the compiling process until its pieces are loaded and checked, or dropped.
_SETTLED_SECONDS = 10.0
# Seconds between two streams. The engine tries pieces on the longest step while it is idle.
_PAUSE_SECONDS = 0.3
_POLL_SECONDS = 0.1
_ROOM_BYTES = 64 * 2**20
_CC1PLUS = """#!/bin/sh
# Replaces the program that g++ compiles with. Each piece has one file of this name.
case "$*" in
  *.wrapper.cpp*)
    echo x >> '{count}'
    if [ {fails} = all ] || [ "$(wc -l < '{count}')" = 2 ]
    then echo "error: told to fail" >&2; exit 1
    fi;;
esac
exec '{compiler}' "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the compiling process."""

    fails: str | None = None  # Pieces that the C++ compiler refuses: `one` or `all`.
    to_process: Callable[[psutil.Process], None] | None = None  # Applied to the process.
    flags: tuple[str, ...] = ()


@dataclass(slots=True)
class Stream:
    """The gaps between the tokens of streams, in seconds."""

    gaps: list[float] = field(default_factory=list)
    compiled_for: float = 0.0  # Seconds that the compiling process ran.
    info: dict[str, Any] = field(default_factory=dict)  # `/server_info` at the end.

    @property
    def longest(self) -> float:
        return max(self.gaps)

    @property
    def pieces(self) -> int:
        """Number of distinct pieces in use at the end."""
        return int(self.info["graphs"]["distinct_pieces"])

    @property
    def median(self) -> float:
        return statistics.median(self.gaps)


def _kill(process: psutil.Process) -> None:
    time.sleep(_POLL_SECONDS)
    process.send_signal(signal.SIGKILL)


def _take_memory(process: psutil.Process) -> None:
    """Limit the process's address space to little more than it has once it works."""
    while process.memory_info().rss < 4 * _ROOM_BYTES:
        time.sleep(_POLL_SECONDS)
    most = process.memory_info().vms + _ROOM_BYTES
    process.rlimit(psutil.RLIMIT_AS, (most, most))


FAULTS: Mapping[str, Fault] = {
    "no fault": Fault(),
    "one piece cannot be compiled": Fault(fails="one"),
    "no piece can be compiled": Fault(fails="all"),
    "little memory": Fault(to_process=_take_memory),
    "the compiling process is killed": Fault(to_process=_kill),
}
WITHOUT = Fault(flags=("--disable-piecewise-cuda-graph",))


def watch(
    model_path: str, fault: Fault, *, seconds: float = 0.0, flags: Sequence[str] = ()
) -> Stream:
    """Serve a model with an empty cache, and read streams until its pieces are loaded or dropped,
    for `seconds` at least.

    Raises `ValueError` if the server does not start.
    """
    print(
        f"compiling process: {next((name for name in FAULTS if FAULTS[name] is fault), 'none')}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory(prefix="piecework-bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "piecework",
            "serve",
            "--model-path",
            model_path,
            "--log-level",
            "error",
        ]
        with _server(
            [*command, *flags, *fault.flags], os.environ | _environment(Path(folder), fault)
        ) as (process, url):
            return asyncio.run(_watch(process, Target(base_url=url), fault, seconds))


def _environment(folder: Path, fault: Fault) -> dict[str, str]:
    """Return variables that give the compiling process an empty cache and a compiler that fails."""
    made = {
        "PIECEWORK_CACHE_DIR": str(folder / "pieces"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    if fault.fails is None:
        return made
    script = folder / "cc1plus"
    script.write_text(
        _CC1PLUS.format(count=folder / "count", fails=fault.fails, compiler=_cc1plus())
    )
    script.chmod(0o700)
    # $CXX is not changed, because that would rebuild the kernels of this CPU.
    return made | {"COMPILER_PATH": str(folder)}


def _cc1plus() -> str:
    try:
        asked = [os.environ.get("CXX") or "g++", "-print-prog-name=cc1plus"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = ""
    if not Path(found).is_absolute():
        raise ValueError(
            "faults are seeded in g++, which is not there: install it, or leave out the part faults"
        )
    return found


@contextlib.contextmanager
def _server(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[tuple[psutil.Process, str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def _watch(server: psutil.Process, target: Target, fault: Fault, seconds: float) -> Stream:
    found = Stream()
    async with Client(target) as client:
        await _ready(client, server)
        began = time.monotonic()
        meeting = (
            asyncio.create_task(asyncio.to_thread(_meet, server, fault, found))
            if not fault.flags
            else None
        )
        async for gap in _gaps(client):
            found.gaps.append(gap)
            settled = (
                time.monotonic() - _SETTLED_SECONDS if meeting is None or meeting.done() else -1.0
            )
            if settled - began >= max(seconds - _SETTLED_SECONDS, found.compiled_for):
                break
        if meeting is not None:
            await meeting
        found.info = await client.get_json("/server_info")
    return found


def _meet(server: psutil.Process, fault: Fault, found: Stream) -> None:
    """Wait for the compiling process, apply the fault to it, and wait for its end."""
    began = time.monotonic()
    while (process := _compiling(server)) is None:
        if time.monotonic() - began > _READY_SECONDS:
            raise ValueError(
                "the server has started no compiling process; `piecework explain` says why"
            )
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(psutil.NoSuchProcess):
        if fault.to_process is not None:
            fault.to_process(process)
        process.wait()
    found.compiled_for = time.monotonic() - began


def _compiling(server: psutil.Process) -> psutil.Process | None:
    for process in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "piecework.runtime.graphs.compile_pieces" in process.cmdline():
                return process
    return None


async def _gaps(client: Client) -> AsyncIterator[float]:
    """Yield the seconds between two tokens of a stream. Streams follow one another, with pauses."""
    while True:
        before = None
        async with contextlib.aclosing(client.events("/v1/completions", _STREAM)) as events:
            async for event in events:
                if before is not None:
                    yield event.time - before
                before = event.time
        await asyncio.sleep(_PAUSE_SECONDS)


async def _ready(client: Client, server: psutil.Process) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            await client.get("/health")
            return
        except RequestFailed:
            if (
                not server.is_running()
                or server.status() == psutil.STATUS_ZOMBIE
                or time.monotonic() > deadline
            ):
                raise ValueError("the server did not start; its error stands above") from None
            await asyncio.sleep(_POLL_SECONDS)
