"""Checks grammars of clients in processes that can be killed.

    await check("start: /a+/")     # raises ValueError

A few hundred bytes of grammar may take any time and memory. A process ends when a grammar takes too
much, or when its caller stops waiting. If something else ends the process, such as the system when
memory runs out, the grammar is checked once more in a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from . import grammar

SECONDS, MEGABYTES = 3, 96  # Limits of CPU time in seconds and of memory in MB for one grammar.
_PROCESSES = 2
_STACK_BYTES = 128 * 2**20
_KEPT_KILOBYTES = 16 * 2**10  # A process whose heap has grown beyond this ends after its answer.
_NO_MEMORY = 3  # Exit code of a process without memory, if Python notices first.
# The exceeded limit, by the return code of the process.
_LIMITS = {
    -signal.SIGXCPU: f"{SECONDS} s of the processor's time",
    # A library without memory aborts or overflows the stack.
    **dict.fromkeys((-signal.SIGABRT, -signal.SIGSEGV, _NO_MEMORY), f"{MEGABYTES} MB of memory"),
}
# Grammars that need no check do not wait for grammars that take seconds.
_makers = ThreadPoolExecutor(1, thread_name_prefix="grammar-make")
_threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="grammar-check")
_idle: list[subprocess.Popen[bytes]] = []


class CheckUnavailable(Exception):
    """A grammar could not be checked, for a reason outside of it."""


async def check(text: str, last_id: int = 0) -> None:
    """Raise `ValueError` for a grammar that `grammar.checked` refuses or that takes too much."""
    await made(lambda: (text, last_id))


async def made(make: Callable[[], tuple[str, int | None]]) -> str:
    """Return the grammar that `make` returns, after a check.

    `make` runs in a thread, one call at a time. It also returns the highest token id of the
    grammar, or None for a grammar that needs no check. Raise the errors of `make` and `check`, and
    `CheckUnavailable`.
    """
    loop = asyncio.get_running_loop()
    text, last_id = await loop.run_in_executor(_makers, make)
    if last_id is None:
        return text
    job = _Job(text, last_id)
    try:
        await loop.run_in_executor(_threads, job.run)
    except asyncio.CancelledError:
        job.end()
        raise
    return text


class _Job:
    def __init__(self, text: str, last_id: int) -> None:
        self._grammar = text, last_id
        self._lock = Lock()
        self._is_ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Check the grammar. Raise `ValueError` or `CheckUnavailable`."""
        try:
            error = self._error(_idle_one)
        except CheckUnavailable:
            error = self._error(_start)
        if error is not None:
            raise ValueError(error)

    def _error(self, process_of: Callable[[], subprocess.Popen[bytes]]) -> str | None:
        with self._lock:
            if self._is_ended:
                return None
            process = self._process = process_of()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(self._grammar).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        with self._lock:
            self._process = None
            if not answer.endswith(b"\n") or self._is_ended:
                # The process has closed its output, or is killed because no caller waits.
                if self._is_ended:
                    process.kill()
                    process.wait()
                    return None
                code = process.wait()
                if code in _LIMITS:
                    return f"the grammar takes more than {_LIMITS[code]}; send a simpler one"
                raise CheckUnavailable(f"the process that checks grammars ended with code {code}")
        _idle.append(process)
        error: str | None = json.loads(answer)
        return error

    def end(self) -> None:
        """Stop the check, because no caller waits for it."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                self._process.kill()


def _idle_one() -> subprocess.Popen[bytes]:
    """Return an idle process. The system may have ended others meanwhile."""
    while _idle:
        process = _idle.pop()
        if process.poll() is None:
            return process
    return _start()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise CheckUnavailable(f"no process can be started: {error.strerror}") from None


def _kilobytes(name: str) -> int:
    """Return what Linux reports about this process."""
    from pathlib import Path

    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Read grammars, one line of JSON each, and write their faults."""
    import os
    import resource

    grammar._STACK_BYTES = _STACK_BYTES
    grammar.checked('start: "a"')
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)
    at_first = most = 0
    # Other systems than Linux limit only the time.
    with contextlib.suppress(OSError):
        limit = _kilobytes("VmData") * 1024 + _STACK_BYTES + MEGABYTES * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        at_first = _kilobytes("VmHWM")
    for line in sys.stdin.buffer:
        text, last_id = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            grammar.checked(text, last_id)
            error = None
        except ValueError as reason:
            error = str(reason)
        except (MemoryError, RuntimeError):
            # Python cannot start a thread without memory for its stack.
            os._exit(_NO_MEMORY)
        print(json.dumps(error), flush=True)
        with contextlib.suppress(OSError):
            most = _kilobytes("VmHWM")
        if most - at_first > _KEPT_KILOBYTES:
            break


if __name__ == "__main__":
    main()
