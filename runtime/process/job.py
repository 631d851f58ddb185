"""The job of an engine process: the first line of its standard input, as JSON.

The parent starts the process before it knows the job, so that the process imports meanwhile:

    process = subprocess.Popen(command(ENGINE, "piecework.runtime.engine.text"), stdin=PIPE)
    Job(settings=asdict(config), log_level="info", socket=path).send(process)
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from .parent import end_with_parent, read_line

T = TypeVar("T")
ENGINE = "piecework.runtime.engine.process"
RANK = "piecework.runtime.engine.rank_process"
EXIT_USER_ERROR = 2
# On this signal an engine process prints the stacks of its threads to its standard error.
DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine process computes, and where it gets its requests.

    Attributes:
        settings: The fields of the engine's config.
        socket: Path of the server's socket; rank 0 only. The following are for the other ranks.
        connection: File descriptor of the connection to rank 0, or None if rank 0 is on another
            machine. The rank then joins rank 0, which sends the fields below.
        is_server: Whether rank 0 serves, and therefore never pauses while it has requests.
        size, local_size: Numbers of all ranks, and of the ranks of this machine.
        host, port: Address of the store where the ranks meet.
        timeout: Seconds that a rank waits for another rank.
    """

    settings: dict[str, Any]
    log_level: str
    socket: str | None = None
    rank: int = 0
    connection: int | None = None
    is_server: bool = True
    size: int = 1
    local_size: int = 1
    host: str = ""
    port: int = 0
    timeout: float = 0.0

    def send(self, process: subprocess.Popen[bytes]) -> None:
        """Write the job to a process. If the process has ended already, its exit code says so."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(self)).encode() + b"\n")
            process.stdin.flush()

    @classmethod
    def read(cls, find: Callable[[], T]) -> tuple[T, Self]:
        """Return what `find` imports, and the job. Call this first in an engine process.

        Importing may take seconds. Meanwhile the parent writes the job. From then on, the process
        ends when its parent ends.
        """
        # Ctrl-C and a service manager's stop reach every process of the group; the web process
        # decides when the engine ends, and rank 0 decides when the other ranks end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The watchdog sends this before it kills a process that hangs. The handler needs no lock.
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        # Objects of imports stay alive: searching them for garbage would only slow the imports
        # down.
        gc.disable()
        try:
            found = find()
        finally:
            gc.enable()
        job = cls(**json.loads(read_line()))
        end_with_parent()
        return found, job


def command(main: str, kind: str, *, lasting: bool = True) -> tuple[str, ...]:
    """Return the command of an engine process: `main` is `ENGINE` or `RANK`, `kind` a module.

    If `lasting`, the kernel kills the process with the thread that starts it.
    """
    parent = ("piecework.runtime.process.parent",) if lasting else ()
    return (sys.executable, "-m", *parent, main, kind)
