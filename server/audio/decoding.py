"""Turns uploaded files into pieces of audio that a speech model can hear.

decoders = Decoders(most_seconds=7200)
async with decoders.open(file, window=30) as pieces:
    async for piece in pieces: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np
from starlette.datastructures import UploadFile

from ...runtime.core.speech_messages import SAMPLE_RATE
from ..core.errors import InvalidRequest, Unavailable

INSTALL = "pip install 'piecework[audio]'"
_PROCESSES = 4
_PART = 2**16  # Bytes that are read or written at once.
_COMMAND = (sys.executable, "-m", "piecework.server.audio.decode_process")
_BROKEN = 3  # `EXIT_BROKEN` of the process, which imports FFmpeg.
_BLOCK = SAMPLE_RATE // 50  # Samples whose loudness is one number.
_PAUSE = 5  # Blocks of a pause.
_LOOK_BACK = 6  # A piece ends in the last sixth of a window, where the audio is most quiet.


class Piece(NamedTuple):
    """Samples as in `SpeechRequest`, which begin at `start` seconds."""

    start: float
    samples: bytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / 2 / SAMPLE_RATE


def check_installed() -> None:
    """Raise `ValueError` with a remedy if files cannot be decoded."""
    if importlib.util.find_spec("av") is None:
        raise ValueError(f"a speech model needs PyAV to decode files of audio; run: {INSTALL}")


class Decoders:
    """Decodes a few files at a time, each in a process. Other files wait in order."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._room = asyncio.Semaphore(_PROCESSES)

    @asynccontextmanager
    async def open(self, file: UploadFile, window: float) -> AsyncIterator[AsyncGenerator[Piece]]:
        """Decode a file into pieces of at most `window` seconds, as fast as they are read.

        Raises `Unavailable` if no process can be started. The pieces raise `InvalidRequest`.
        """
        async with self._room:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_COMMAND,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
            except OSError as error:
                raise Unavailable(
                    f"No process can be started to decode the file: {error.strerror}.",
                    code="no_decoder",
                    headers={"Retry-After": "5"},
                ) from None
            sending = asyncio.create_task(self._send(process, file))
            try:
                yield _pieces(process, int(window * SAMPLE_RATE))
            finally:
                sending.cancel()
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.gather(sending, return_exceptions=True)
                assert process.stdout is not None and process.stderr is not None
                # With output that is not read, asyncio does not notice the end of a process.
                await asyncio.gather(process.stdout.read(), process.stderr.read())
                await process.wait()

    async def _send(self, process: asyncio.subprocess.Process, file: UploadFile) -> None:
        assert process.stdin is not None
        # A broken pipe means that the process has ended. Its exit code says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(f"{self._most_seconds}\n".encode())
            while part := await file.read(_PART):
                process.stdin.write(part)
                await process.stdin.drain()
            process.stdin.close()


async def _pieces(process: asyncio.subprocess.Process, window: int) -> AsyncGenerator[Piece]:
    """Yield the samples of a process in pieces of at most `window` samples."""
    assert process.stdout is not None
    held, start = bytearray(), 0
    while part := await process.stdout.read(_PART):
        held += part
        while len(held) > 2 * window:
            size = 2 * pause(np.frombuffer(held[: 2 * window], "<i2"))
            yield Piece(start / SAMPLE_RATE, bytes(held[:size]))
            del held[:size]
            start += size // 2
    await _check_end(process)
    if held:
        yield Piece(start / SAMPLE_RATE, bytes(held[: len(held) // 2 * 2]))


async def _check_end(process: asyncio.subprocess.Process) -> None:
    """Raise `InvalidRequest` unless all audio was decoded."""
    assert process.stderr is not None
    reason = (await process.stderr.read(_PART)).decode(errors="replace").strip()
    code = await process.wait()
    if code == _BROKEN:
        raise InvalidRequest(f"file: {reason}.", param="file", code="invalid_audio")
    if code:
        raise InvalidRequest(
            "file: decoding it takes too much memory or time, or it is damaged; send it in another "
            "format, such as FLAC.",
            param="file",
            code="invalid_audio",
        )


def pause(samples: np.ndarray[tuple[int], np.dtype[np.int16]]) -> int:
    """Return where to cut the samples of a window: in the most quiet place near its end."""
    first = len(samples) - len(samples) // _LOOK_BACK
    number = (len(samples) - first) // _BLOCK
    if number < _PAUSE:
        return len(samples)
    blocks = samples[first : first + number * _BLOCK].reshape(number, _BLOCK)
    loudness = np.square(blocks.astype(np.float64)).sum(axis=1)
    pauses = np.convolve(loudness, np.ones(_PAUSE), "valid")
    # The last one, if several are as quiet.
    quietest = len(pauses) - 1 - int(pauses[::-1].argmin())
    return first + quietest * _BLOCK + _PAUSE * _BLOCK // 2
