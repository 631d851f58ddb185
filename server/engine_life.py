"""One life of the engine process: its sockets, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import zmq
import zmq.asyncio

from ..runtime.ipc import decode, encode, open_socket
from ..runtime.messages import ToEngine

logger = logging.getLogger(__name__)

_LAST_WORDS_MS = 50
"""How long to wait for another message of a process that has ended."""
_KERNEL_COUNTERS = Path("/proc/vmstat")


def count_oom_kills() -> int:
    """Processes that Linux has killed for want of memory since it started, those of containers too; 0 where it does not tell."""
    try:
        lines = _KERNEL_COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class EngineLife:
    """A process with a fresh pair of sockets, so that nothing of an earlier life can reach it.

    `send` never blocks: what is sent before the process listens is queued.
    """

    def __init__(self, context: zmq.Context[Any], folder: str, number: int) -> None:
        self._to_engine, self._from_engine = (f"ipc://{folder}/{number}.{name}" for name in ("in", "out"))
        self._outbox = open_socket(context, zmq.PUSH, self._to_engine, bind=False)
        self._inbox = open_socket(zmq.asyncio.Context.shadow(context), zmq.PULL, self._from_engine, bind=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self, process: subprocess.Popen[bytes], config: Any, log_level: str, handle: Callable[[Any], None]) -> int:
        """Give a process that waits for it its job, and each of its messages to `handle`; returns its exit code once all were handled.

        `config`: a dataclass, which the process reads as JSON.
        """
        self._process = process
        assert process.stdin is not None
        # A process that has ended already says so by its exit code.
        with contextlib.suppress(BrokenPipeError):
            job = [dataclasses.asdict(config), self._to_engine, self._from_engine, log_level]
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        receiver = asyncio.create_task(self._receive(handle))
        # A message that cannot be handled must not leave requests waiting for ever: the next life begins anew.
        receiver.add_done_callback(lambda task: None if task.cancelled() else self.kill())
        code = await asyncio.to_thread(process.wait)
        while not receiver.done() and await self._inbox.poll(_LAST_WORDS_MS):
            await asyncio.sleep(0)
        receiver.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for error in await asyncio.gather(receiver, return_exceptions=True):
            if not isinstance(error, asyncio.CancelledError):
                logger.error("a message of the engine could not be handled", exc_info=error)
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        return code

    def send(self, message: ToEngine) -> None:
        if not self._outbox.closed:
            self._outbox.send_multipart(encode(message))

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _receive(self, handle: Callable[[Any], None]) -> NoReturn:
        while True:
            handle(decode(await self._inbox.recv_multipart()))
