"""Grammars of clients are checked in processes that can be ended: a few hundred bytes may ask for
any time and memory.

    await check("start: /a+/")     # raises ValueError

A process ends when a grammar takes too much, or when nobody waits for its answer any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from . import grammar

SECONDS, MEGABYTES = 3, 160
"""Of the processor, and of memory, that one grammar may take."""
_PROCESSES = 2
_STACK_BYTES = 128 * 2**20
_threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="grammar-check")
_idle: list[subprocess.Popen[bytes]] = []


async def check(text: str, last_id: int = 0) -> None:
    """Raise `ValueError` for a grammar that cannot be followed, as `grammar.checked` does, or that
    takes too much time or memory.
    """
    await made(lambda: (text, last_id))


async def made(make: Callable[[], tuple[str, int | None]]) -> str:
    """The grammar that `make` gives, checked. `make` runs in a thread, few at a time. It also gives
    the highest token that the grammar names, or None for a grammar that needs no check. Raises what
    `make` and `check` do.
    """
    job = _Job(make)
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, job.run)
    except asyncio.CancelledError:
        job.end()
        raise


class _Job:
    def __init__(self, make: Callable[[], tuple[str, int | None]]) -> None:
        self._make = make
        self._lock = Lock()
        self._is_ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> str:
        """The grammar. Raises `ValueError`."""
        text, last_id = self._make()
        if last_id is not None and (error := self._error(text, last_id)) is not None:
            raise ValueError(error)
        return text

    def _error(self, text: str, last_id: int) -> str | None:
        with self._lock:
            if self._is_ended:
                return None
            process = self._process = _idle_one() or _start()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps([text, last_id]).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        with self._lock:
            self._process = None
            if not answer.endswith(b"\n") or self._is_ended:
                process.kill()
                process.wait()
                return (
                    f"the grammar takes more than {SECONDS} s of the processor's time or "
                    f"{MEGABYTES} MB; send a simpler one"
                )
        _idle.append(process)
        error: str | None = json.loads(answer)
        return error

    def end(self) -> None:
        """Nobody waits for the answer."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                self._process.kill()


def _idle_one() -> subprocess.Popen[bytes] | None:
    """One that lives: the system may have ended others meanwhile."""
    while _idle:
        process = _idle.pop()
        if process.poll() is None:
            return process
    return None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _bound_memory() -> None:
    import resource
    from pathlib import Path

    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            most = int(line.split()[1]) * 1024 + _STACK_BYTES + MEGABYTES * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _bound_time() -> None:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main() -> None:
    """Answer grammars, a line of JSON each, with what is wrong with them."""
    import os
    import resource

    grammar._STACK_BYTES = _STACK_BYTES
    grammar.checked('start: "a"')
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    # Other systems than Linux bound the time alone.
    with contextlib.suppress(OSError):
        _bound_memory()
    for line in sys.stdin.buffer:
        text, last_id = json.loads(line)
        _bound_time()
        try:
            grammar.checked(text, last_id)
            error = None
        except ValueError as reason:
            error = str(reason)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
