"""Starts engine processes: they import what they need, which takes seconds, and then wait for a job
on their standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...runtime.process.parent import ENVIRONMENT

_PARENT, _ENGINE = "piecework.runtime.process.parent", "piecework.runtime.engine.process"
_PROCESS = (sys.executable, "-m", _PARENT, _ENGINE)
LANGUAGE_MODEL = (*_PROCESS, "piecework.runtime.engine.text_process")
DIFFUSION_PIPELINE = (*_PROCESS, "piecework.runtime.diffusion.engine_process")
POOLING_MODEL = (*_PROCESS, "piecework.runtime.pooling.engine_process")

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that ends when its standard input does. Raises `ValueError` where the system cannot
    hold signals back: Windows.
    """
    if not hasattr(signal, "pthread_sigmask"):
        raise ValueError(
            "a server needs Linux or macOS; here take WSL, or run the model in your own process "
            "with piecework.LLM"
        )
    # It inherits that these are held back, and ignores them as soon as it can: whoever stops a
    # group of processes stops this one, not it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, env={**ENVIRONMENT, **os.environ})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def spawned(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The same, ended with the block at the latest. For the main thread.

    Until the block takes SIGINT and SIGTERM itself, they end this process at once, with 128 + their
    number: a KeyboardInterrupt in the middle of an import may end in a callback, where exceptions
    are ignored.
    """
    process = spawn(command)

    def leave(number: int, _: object) -> None:
        process.kill()
        process.wait()
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in _STOPPING}
    try:
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
