"""Servers that a measurement starts and ends, by any command that takes a port."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from .apis import GenerationCall, ask
from .client import Client, RequestFailed, ServerUnusable, resolve
from .target import Target

MIB = 1024 * 1024
# Replaced by a free port in a command. Without it, the port is appended to the command.
PORT = "{port}"
_READY_SECONDS = 300.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1


@contextmanager
def running_server(label: str, command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a server on a free port, and end it with all processes that it started.

    Meanwhile, SIGTERM raises `KeyboardInterrupt`, so that it ends the server too. Call this in the
    main thread. Raises `ServerUnusable` if the command cannot be run.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    words = shlex.split(command)
    words = (
        [word.replace(PORT, str(port)) for word in words]
        if PORT in command
        else [*words, str(port)]
    )
    # A script's background jobs ignore SIGINT, so SIGTERM gets its handler.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerUnusable(
                f"the server {label} cannot be started: {words[0]}: {error.strerror}"
            ) from None
        try:
            yield process, port
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            # Kill the processes that outlived their parent.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


async def first_token(label: str, target: Target, process: subprocess.Popen[bytes]) -> Target:
    """Return the target with the name of its model, as soon as it answers.

    Raises `ServerUnusable` if it does not answer.
    """
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            named = await resolve(target)
            async with Client(named) as client:
                await ask(client, GenerationCall(prompt="Hello", max_tokens=1))
            return named
        except (ServerUnusable, RequestFailed):
            await asyncio.sleep(_POLL_SECONDS)
    state = (
        "ended" if process.poll() is not None else f"gave no answer within {_READY_SECONDS:.0f} s"
    )
    raise ServerUnusable(
        f"the server {label} {state}; run its command by hand to see why: "
        f"{shlex.join(map(str, process.args))}"  # type: ignore[arg-type]
    )


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants, in bytes.

    Raises `ServerUnusable` if there is no such process.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(pid)
        family = [process, *process.children(recursive=True)]
        return sum(_resident(member) for member in family)
    except psutil.NoSuchProcess:
        raise ServerUnusable(f"there is no process {pid}") from None


def _resident(process: Any) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
