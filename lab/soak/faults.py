"""Kills and stops the engine process of a server of this machine during a soak."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

_ENGINE = "piecework.runtime.engine.process"
_POLL_SECONDS = 0.2
# Seconds until a stopped process must be replaced; more than the default of --watchdog-timeout.
_GONE_SECONDS = 900.0
_READY_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults: `kills` times SIGKILL and `hangs` times SIGSTOP, in an order that `seed` draws,
    with `interval` seconds of service between them.
    """

    server_pid: int
    kills: int
    hangs: int
    interval: float
    seed: int

    async def commit(
        self, ready: Callable[[], Awaitable[bool]], tell: Callable[[str], None]
    ) -> None:
        """Cause one fault after another. Call `tell` with each when the server serves again.

        Raises `TimeoutError` if it does not serve again, and `psutil.NoSuchProcess` if it has
        ended.
        """
        kinds = ["killed"] * self.kills + ["stopped"] * self.hangs
        random.Random(self.seed).shuffle(kinds)
        for kind in kinds:
            engine = await self._engine()
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill() if kind == "killed" else engine.suspend()
            await _until(lambda engine=engine: _gone(engine), _GONE_SECONDS)  # type: ignore[misc]
            async with asyncio.timeout(_READY_SECONDS):
                while not await ready():
                    if _gone(psutil.Process(self.server_pid)):
                        raise psutil.NoSuchProcess(self.server_pid)
                    await asyncio.sleep(_POLL_SECONDS)
            tell(kind)
            await asyncio.sleep(self.interval)

    async def _engine(self) -> psutil.Process:
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [
                child for child in psutil.Process(self.server_pid).children() if _is_engine(child)
            ]
            return bool(found)

        await _until(look, _READY_SECONDS)
        return found[0]


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(_ENGINE in word for word in process.cmdline())
    return False


def _gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(_POLL_SECONDS)
