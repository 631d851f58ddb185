"""A running service: an engine, its application and the text of its start-up summary."""

from __future__ import annotations

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

    async def settle(self) -> None:
        """Wait a little for what the summary says besides the engine."""
        if self.media is not None:
            await self.media.settle(_SETTLE_SECONDS)

    async def close(self) -> None:
        """End what the application of a fleet's model has started."""
        if self.media is not None:
            await self.media.close()
