"""Starts engine processes.

An engine process first imports its modules, which takes seconds, and then reads its job from
standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from ...runtime.process.job import ENGINE, command
from ...runtime.process.parent import ENVIRONMENT, KERNELS

LANGUAGE_MODEL = command(ENGINE, "piecework.runtime.engine.text")
DIFFUSION_PIPELINE = command(ENGINE, "piecework.runtime.diffusion.engine")
POOLING_MODEL = command(ENGINE, "piecework.runtime.pooling.engine")
SPEECH_MODEL = command(ENGINE, "piecework.runtime.speech.engine")

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def spawn(
    command: Sequence[str], *, kernels: Literal["later", "required"] = "later"
) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input is closed.

    `kernels`: whether the process may serve without kernels that must be compiled first, or
    compiles them while another process serves.

    Raises `ValueError` on Windows, which cannot block signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        raise ValueError(
            "a server needs Linux or macOS; on Windows use WSL, or run the model in your own "
            "process with piecework.LLM"
        )
    # The child inherits the blocked signals and later ignores them. A signal to the process group
    # therefore stops only this process, which then stops the child in order.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, env={**ENVIRONMENT, KERNELS: kernels, **os.environ}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def spawned(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process as `spawn` and end it with the block. Call it in the main thread.

    Until the block handles SIGINT and SIGTERM itself, they end this process at once with exit code
    128 + their number. A KeyboardInterrupt would be lost if it is raised in a callback during an
    import, because exceptions of such callbacks are ignored.
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
