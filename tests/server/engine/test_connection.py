"""The socket of one engine process, as the web process reads it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from piecework.runtime.core.messages import AbortRequests, FlushCache
from piecework.runtime.process.message_socket import MessageSocket
from piecework.server.engine.connection import EngineConnection


@dataclass
class Config:
    """Of a process that does not read it."""


async def test_an_engine_that_is_faster_than_this_process_leaves_others_their_turn() -> None:
    """And what it said before it ended is handled, all of it."""
    turns, seen = 0, list[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def handle(frames: list[bytes]) -> None:
        time.sleep(0.0005)
        seen.append(turns)

    with EngineConnection() as connection:
        engine = MessageSocket.connect(connection._path)
        for _ in range(200):
            assert engine.send([b"name", b"content"])
        process = subprocess.Popen(["sleep", "0.2"], stdin=subprocess.PIPE)
        beside = asyncio.create_task(others())
        assert await connection.run(process, Config(), "info", handle) == 0
        beside.cancel()
        engine.close()
    assert len(seen) == 200
    assert len(set(seen)) > 10


async def test_what_the_process_does_not_take_yet_reaches_it_when_it_does() -> None:
    """Also what was sent before it was there; the web process never waits."""
    with EngineConnection() as connection:
        for _ in range(3):
            connection.send(FlushCache())
        process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
        life = asyncio.create_task(connection.run(process, Config(), "info", lambda _: None))
        engine = MessageSocket.connect(connection._path)
        await asyncio.sleep(0.05)
        connection.send(AbortRequests(rids=["r" * 2**20]))
        connection.send(FlushCache())
        taken = []
        async with asyncio.timeout(60):
            while len(taken) < 5:
                if (frames := engine.receive()) is not None:
                    taken.append((frames[0], len(frames[1])))
                await asyncio.sleep(0)
        connection.kill()
        await life
        engine.close()
    assert [name for name, _ in taken] == [b"FlushCache"] * 3 + [b"AbortRequests", b"FlushCache"]
    assert taken[3][1] > 2**20


@pytest.mark.parametrize("length", [70, 130])
def test_a_folder_for_temporary_files_may_have_a_long_path(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the path of a socket may be, as clusters have them for each job."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with EngineConnection() as connection:
            MessageSocket.connect(connection._path).close()
            assert any(folder.iterdir()) is (length < 75)
            assert not Path(connection._path).parent.stat().st_mode & 0o077
