"""The client of the processes that decode and resize images.

A file of a stranger may crash a decoder, or take it minutes. The process that works on it is ended
then, the request gets an error, and the next request gets a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeVar

from ...runtime.core.images import Preprocess, Preprocessed, PreprocessReady
from ...runtime.process.ipc import Unreadable
from ...runtime.process.message_pipe import HEAD_BYTES, pack, size, unpack
from ..core.errors import Unavailable

logger = logging.getLogger(__name__)

Message = TypeVar("Message", PreprocessReady, Preprocessed)
COMMAND = (sys.executable, "-m", "piecework.runtime.multimodal.preprocess_process")
SECONDS = 30.0  # Time for the images of one request.
START_SECONDS = 120.0  # Time for the imports, and for a trial.
_CORES = 4  # Cores of the machine for each process.
_RETRY_SECONDS = 30  # Time after which a process is started again that could not start.
_RETRY = {"Retry-After": f"{_RETRY_SECONDS}"}
_MOST_ANSWER = 2**31  # Bytes of an answer. A larger one is damaged.
# Bytes that asyncio reads before it lets the process wait. Tensors of an image have a few MiB.
_READ_AHEAD = 2**23


class Unusable(Unavailable):
    """The model's files, or libraries that are missing, let no image be read.

    Attributes:
        reason: What is at fault, with a remedy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"Images cannot be read: {reason}.", code="no_images", headers=_RETRY)
        self.reason = reason


class ProcessEnded(Exception):
    """The images of a request have ended the process that read them."""


class Preprocessor(Protocol):
    """Turns the text and the files of a prompt into ids and tensors."""

    async def ready(self) -> PreprocessReady:
        """Return what is known of the model's images. Raise `Unavailable`, or its kind
        `Unusable`.
        """
        ...

    async def run(self, request: Preprocess) -> Preprocessed:
        """Return the ids and images, or why they are refused.

        Raise `ProcessEnded` if the images end the process or take too long, and `Unavailable`.
        """
        ...

    async def close(self) -> None: ...


class PreprocessProcesses:
    """A few processes, each of which works on one request at a time. Other requests wait in order.

    A process starts when it is needed.
    """

    def __init__(self, arguments: Sequence[str], count: int | None = None) -> None:
        """`arguments` are those of the process: the model, and the tokenizer if it is another.

        A process takes about 400 MB, so there are two only on machines with `_CORES` for each.
        """
        count = count or max(1, min(2, (os.cpu_count() or 1) // _CORES))
        self._command = (*COMMAND, *arguments)
        self._room = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._info: PreprocessReady | None = None
        self._working: set[asyncio.Task[Preprocessed]] = set()
        self._failed: tuple[float, Unavailable] | None = None

    async def ready(self) -> PreprocessReady:
        if self._info is None:
            async with self._room:
                self._idle.append(await self._one())
        assert self._info is not None
        return self._info

    async def run(self, request: Preprocess) -> Preprocessed:
        await self._room.acquire()
        try:
            process = await self._one()
        except BaseException:
            self._room.release()
            raise
        work = asyncio.create_task(self._work(process, request))
        self._working.add(work)
        work.add_done_callback(self._has_worked)
        # If the caller leaves, the work goes on: a new process would take longer to start.
        return await asyncio.shield(work)

    async def _work(self, process: _Process, request: Preprocess) -> Preprocessed:
        try:
            async with asyncio.timeout(SECONDS):
                answer = await process.ask(request)
        except BaseException as error:
            self._all.discard(process)
            await asyncio.shield(process.end())
            if isinstance(error, TimeoutError):
                raise ProcessEnded(f"reading the images takes more than {SECONDS:g} s") from None
            if isinstance(error, EOFError | ConnectionError | Unreadable):
                logger.warning("a process that reads images has ended (%s)", process.exit_code)
                raise ProcessEnded("the process that read the images has ended") from None
            raise
        self._idle.append(process)
        return answer

    def _has_worked(self, work: asyncio.Task[Preprocessed]) -> None:
        self._working.discard(work)
        self._room.release()
        if not work.cancelled():
            work.exception()  # Its caller may have left.

    async def close(self) -> None:
        for work in self._working:
            work.cancel()
        await asyncio.gather(*[process.end() for process in self._all])

    async def _one(self) -> _Process:
        """Return a process that is ready. The caller has room for one."""
        # The system may have ended an idle process.
        while self._idle and self._idle[-1].exit_code is not None:
            self._all.discard(self._idle.pop())
        if self._idle:
            return self._idle.pop()
        if self._failed is not None and time.monotonic() < self._failed[0]:
            raise self._failed[1]
        return await self._new()

    async def _new(self) -> _Process:
        process = _Process()
        self._all.add(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                info = await process.start(self._command)
        except (OSError, EOFError, TimeoutError, Unreadable) as error:
            return await self._fail(
                process,
                Unavailable(
                    f"Images cannot be read: the process that reads them does not start "
                    f"({type(error).__name__}).",
                    code="no_images",
                    headers=_RETRY,
                ),
            )
        except BaseException:
            self._all.discard(process)
            await asyncio.shield(process.end())
            raise
        if info.error is not None:
            return await self._fail(process, Unusable(info.error))
        self._info = info
        return process

    async def _fail(self, process: _Process, refusal: Unavailable) -> NoReturn:
        """End a process that cannot start. Requests are refused for a while."""
        self._all.discard(process)
        await process.end()
        self._failed = time.monotonic() + _RETRY_SECONDS, refusal
        raise refusal


class _Process:
    """One process. Call `start` once, then `ask`, one call at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self, command: Sequence[str]) -> PreprocessReady:
        """Start the process and return its first message."""
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_READ_AHEAD,
        )
        return await self._read(PreprocessReady)

    async def ask(self, request: Preprocess) -> Preprocessed:
        """Send a request and return its answer. Raise `EOFError` if the process ends."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(pack(request))
            await self._process.stdin.drain()
        except RuntimeError as error:  # The pipe is closed.
            raise EOFError from error
        return await self._read(Preprocessed)

    async def end(self) -> None:
        """Kill the process."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdout is not None
        # With output that is not read, asyncio does not notice the end of a process.
        while await process.stdout.read(2**20):
            pass
        await process.wait()

    async def _read(self, kind: type[Message]) -> Message:
        assert self._process is not None and self._process.stdout is not None
        read = self._process.stdout.readexactly
        head = await read(HEAD_BYTES)
        if size(head) > _MOST_ANSWER:
            raise EOFError("the answer is damaged")
        message = unpack(head, await read(size(head)))
        assert isinstance(message, kind)
        return message
