"""A running service: an engine, its application and the text of its start-up summary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI

from ..engine.interface import Engine
from ..media.media import Media

_SETTLE_SECONDS = 20.0


class Service(NamedTuple):
    """The parts of a running server.

    `summary` maps (info of the engine, port, seconds since the start) to the lines to print. It is
    called once the engine is ready.
    """

    engine: Engine
    app: FastAPI
    summary: Callable[[Any, int, float], str]

    @property
    def media(self) -> Media | None:
        """What reads images, if the model takes any."""
        found: Media | None = getattr(self.app.state.serving, "media", None)
        return found

    async def until_failed(self) -> None:
        """Wait until the engine is given up, or the model's images cannot be read."""
        ends = [self.engine.failed, *([] if self.media is None else [self.media.failed])]
        waits = [asyncio.create_task(event.wait()) for event in ends]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    @property
    def failure(self) -> str | None:
        """Why the service has failed, or None if it has not."""
        if self.engine.failed.is_set():
            return self.engine.failure or "the engine is gone"
        return None if self.media is None else self.media.failure

    @property
    def is_user_error(self) -> bool:
        """Whether the user can correct what the service has failed for."""
        return self.engine.user_error or not self.engine.failed.is_set()

    async def settle(self) -> None:
        """Wait a little for what the summary says besides the engine."""
        if self.media is not None:
            await self.media.settle(_SETTLE_SECONDS)

    async def close(self) -> None:
        """End what the application of a fleet's model has started."""
        if self.media is not None:
            await self.media.close()
