"""One life of the engine process: its socket, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ...runtime.core.messages import ToEngine
from ...runtime.engine.process import DUMP_SIGNAL
from ...runtime.process.ipc import encode
from ...runtime.process.message_socket import MessageSocket

logger = logging.getLogger(__name__)

_DUMP_SECONDS = 1.0
_AT_A_TIME = 8
"""Messages that are handled before connections have their turn: an engine may make them faster than
they are handled, for as long as its requests last.
"""
_LONGEST = 75
"""Bytes of the folder for temporary files that leave room for ours: the path of a socket has 103 on
macOS, 107 on Linux.
"""


class EngineConnection:
    """A process with a fresh socket, so that nothing of an earlier life can reach it.

    `send` never blocks: what is sent before the process listens is queued.
    """

    def __init__(self) -> None:
        folder = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="piecework-", dir=folder if len(os.fsencode(folder)) <= _LONGEST else "/tmp"
        )
        self._path = f"{self._folder}/engine"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self._path)
        self._listener.listen(1)
        self._socket: MessageSocket | None = None
        self._early: list[list[bytes]] = []
        """What is sent before the process is there."""
        self._handle: Callable[[list[bytes]], None] | None = None
        """Who is given messages; None: nobody any more."""
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
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
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
            job = [dataclasses.asdict(config), self._path, log_level]
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        self._handle = handle
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        try:
            code = await _exit_code(process)
            # All that it has said is here by now.
            self._accept()
            while self._receive():
                await asyncio.sleep(0)
        finally:
            self._stop_receiving()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return code

    def send(self, message: ToEngine) -> None:
        if self._socket is None:
            self._early.append(encode(message))
        elif not self._socket.send(encode(message)):
            self._send_later(self._socket)

    async def dump_and_kill(self) -> None:
        """Have a process that hangs print where it does, as far as it still can, and end it."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(DUMP_SIGNAL)
            await asyncio.sleep(_DUMP_SECONDS)
        self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _accept(self) -> None:
        if self._socket is not None or self._handle is None:
            return
        loop = asyncio.get_running_loop()
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            logger.exception("the engine process cannot be heard")
            self._end()
            return
        loop.remove_reader(self._listener)
        self._socket = MessageSocket(connected)
        for frames in self._early:
            self._socket.send(frames)
        self._early.clear()
        self._send_later(self._socket)
        loop.add_reader(self._socket, self._receive)

    def _send_later(self, to: MessageSocket) -> None:
        """What the process has not taken yet, when it does."""
        loop = asyncio.get_running_loop()
        if to.flush():
            loop.remove_writer(to)
        else:
            loop.add_writer(to, self._send_later, to)

    def _receive(self) -> bool:
        """Handle messages, some at a time; returns whether there was one."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        if self._socket is None or self._handle is None:
            return False
        loop = asyncio.get_running_loop()
        try:
            for count in range(_AT_A_TIME):
                frames = self._socket.receive()
                if frames is None:
                    if self._socket.is_closed:
                        loop.remove_reader(self._socket)
                    return count > 0
                self._handle(frames)
                if not self._socket.has_more:
                    return True
        except Exception:
            # It must not leave requests waiting for ever: the next life begins anew.
            logger.exception("a message of the engine could not be handled")
            self._end()
            return False
        # What has been read already makes no socket readable.
        self._more = loop.call_soon(self._receive)
        return True

    def _end(self) -> None:
        self._stop_receiving()
        self.kill()

    def _stop_receiving(self) -> None:
        self._handle = None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        if self._socket is not None:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
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
