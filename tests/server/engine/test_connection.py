"""The sockets of one engine process, as the web process reads them."""

from __future__ import annotations

import asyncio
import subprocess
import time
from dataclasses import dataclass

import zmq

from piecework.runtime.engine.ipc import open_socket
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

    with zmq.Context() as context, EngineConnection(context) as connection:
        outbox = open_socket(context, zmq.PUSH, connection._from_engine, bind=False)
        for _ in range(200):
            outbox.send_multipart([b"name", b"content"])
        process = subprocess.Popen(["sleep", "0.2"], stdin=subprocess.PIPE)
        beside = asyncio.create_task(others())
        assert await connection.run(process, Config(), "info", handle) == 0
        beside.cancel()
        outbox.close()
    assert len(seen) == 200
    assert len(set(seen)) > 10
