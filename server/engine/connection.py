"""The socket of one engine process, and the process's start and end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from ...runtime.process.ipc import encode
from ...runtime.process.job import DUMP_SIGNAL, Job
from ...runtime.process.message_socket import MessageSocket

logger = logging.getLogger(__name__)

_DUMP_SECONDS = 1.0
# Messages handled before the event loop runs other callbacks. An engine may send messages faster
# than they are handled.
_MESSAGES_PER_TURN = 8
# Longest path of the temporary folder, in bytes. A socket's path may have 103 bytes on macOS and
# 107 on Linux.
_MAX_FOLDER_BYTES = 75


class EngineConnection:
    """An engine process with its own socket, so no message of an earlier process can reach it.

    `send` never blocks. Messages are queued until the process connects.
    """

    def __init__(self) -> None:
        folder = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="piecework-",
            dir=folder if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES else "/tmp",
        )
        self._path = f"{self._folder}/engine"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self._path)
        self._listener.listen(1)
        self._socket: MessageSocket | None = None
        self._queued: list[list[bytes]] = []  # Messages sent before the process connected.
        self._handle: Callable[[list[bytes]], None] | None = None  # None: receiving has stopped.
        self._next_turn: asyncio.Handle | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process if it is still alive, and remove the socket."""
        self.kill()
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The process's id, or None if it has ended."""
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
        """Send its job to a process that waits for it, and pass its messages to `handle`.

        Return the exit code once all messages are handled. `config` is a dataclass, which the
        process reads as JSON.
        """
        self._process = process
        settings = dataclasses.asdict(config)
        Job(settings=settings, log_level=log_level, socket=self._path).send(process)
        self._handle = handle
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        try:
            code = await _exit_code(process)
            # All messages of the process have arrived by now.
            self._accept()
            while self._receive():
                await asyncio.sleep(0)
        finally:
            self._stop_receiving()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return code

    def send(self, message: ToEngine) -> None:
        if self._socket is None:
            self._queued.append(encode(message))
        elif not self._socket.send(encode(message)):
            self._send_later(self._socket)

    async def dump_and_kill(self) -> None:
        """Ask a process that hangs to print its stacks, then kill it."""
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
            logger.exception("the connection of the engine process cannot be accepted")
            self.end()
            return
        loop.remove_reader(self._listener)
        self._socket = MessageSocket(connected)
        for frames in self._queued:
            self._socket.send(frames)
        self._queued.clear()
        self._send_later(self._socket)
        loop.add_reader(self._socket, self._receive)

    def _send_later(self, to: MessageSocket) -> None:
        """Flush queued bytes now, or when the socket becomes writable."""
        loop = asyncio.get_running_loop()
        if to.flush():
            loop.remove_writer(to)
        else:
            loop.add_writer(to, self._send_later, to)

    def _receive(self) -> bool:
        """Handle up to `_MESSAGES_PER_TURN` messages. Return whether there was one."""
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        if self._socket is None or self._handle is None:
            return False
        loop = asyncio.get_running_loop()
        try:
            for count in range(_MESSAGES_PER_TURN):
                frames = self._socket.receive()
                if frames is None:
                    if self._socket.is_closed:
                        loop.remove_reader(self._socket)
                    return count > 0
                self._handle(frames)
                if not self._socket.has_more:
                    return True
        except Exception:
            # End the process, so that its requests resume in the next one instead of hanging.
            logger.exception("a message of the engine could not be handled")
            self.end()
            return False
        # Messages that are already in the buffer do not make the socket readable.
        self._next_turn = loop.call_soon(self._receive)
        return True

    def end(self) -> None:
        """Kill the process, and drop the messages that have not been handled."""
        self._stop_receiving()
        self.kill()

    def _stop_receiving(self) -> None:
        self._handle = None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        if self._socket is not None:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
        if self._next_turn is not None:
            self._next_turn.cancel()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process in a new thread and return its exit code.

    The event loop's own threads are few and may all be busy with prompts.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def set_code(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_code, code)

    threading.Thread(target=wait, name="engine process", daemon=True).start()
    return await ended
