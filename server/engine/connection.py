"""One life of the engine process: its sockets, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq

from ...runtime.engine.ipc import encode, open_socket
from ...runtime.engine.messages import ToEngine
from ...runtime.engine.process import DUMP_SIGNAL

logger = logging.getLogger(__name__)

_DUMP_SECONDS = 1.0
_LAST_WORDS = 0.05
"""Seconds to wait for another message of a process that has ended."""
_AT_A_TIME = 8
"""Messages that are handled before connections have their turn: an engine may make them faster than
they are handled, for as long as its requests last.
"""


class EngineConnection:
    """A process with a fresh pair of sockets, so that nothing of an earlier life can reach it.

    `send` never blocks: what is sent before the process listens is queued.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._folder = tempfile.mkdtemp(prefix="piecework-")
        self._to_engine, self._from_engine = (
            f"ipc://{self._folder}/{name}" for name in ("in", "out")
        )
        self._outbox = open_socket(context, zmq.PUSH, self._to_engine, bind=False)
        self._inbox = open_socket(context, zmq.PULL, self._from_engine, bind=True)
        self._received = 0
        self._more: asyncio.Handle | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The process has ended, or ends now."""
        self.kill()
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else None
        )

    async def run(
        self,
        process: subprocess.Popen[bytes],
        config: Any,
        log_level: str,
        handle: Callable[[list[bytes]], None],
    ) -> int:
        """Give a process that waits for it its job, and each of its messages to `handle`; returns
        its exit code once all were handled.

        `config`: a dataclass, which the process reads as JSON.
        """
        self._process = process
        assert process.stdin is not None
        # A process that has ended already says so by its exit code.
        with contextlib.suppress(BrokenPipeError):
            job = [dataclasses.asdict(config), self._to_engine, self._from_engine, log_level]
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fileno(), self._receive, handle)
        try:
            self._receive(handle)
            code, received = await _exit_code(process), -1
            while received < self._received:
                received = self._received
                await asyncio.sleep(_LAST_WORDS)
        finally:
            self._stop_receiving()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return code

    def send(self, message: ToEngine) -> None:
        if not self._outbox.closed:
            self._outbox.send_multipart(encode(message))

    async def dump_and_kill(self) -> None:
        """Have a process that hangs print where it does, as far as it still can, and end it."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(DUMP_SIGNAL)
            await asyncio.sleep(_DUMP_SECONDS)
        self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _receive(self, handle: Callable[[list[bytes]], None]) -> None:
        """Handle messages until none is there, some at a time: ZeroMQ tells of new ones only once
        all are read.
        """
        if self._more is not None:
            self._more.cancel()
            self._more = None
        try:
            for _ in range(_AT_A_TIME):
                try:
                    frames = self._inbox.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._received += 1
                handle(frames)
            self._more = asyncio.get_running_loop().call_soon(self._receive, handle)
        except Exception:
            # It must not leave requests waiting for ever: the next life begins anew.
            logger.exception("a message of the engine could not be handled")
            self._stop_receiving()
            self.kill()

    def _stop_receiving(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        if self._more is not None:
            self._more.cancel()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Waits in a thread of its own: the event loop's are few, and may all be busy with prompts, and
    this process would wait for them.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="engine process", daemon=True).start()
    return await ended
