"""A running service: an engine, its application and the text of its start-up summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import FastAPI

from ..engine.interface import Engine

_SETTLE_SECONDS = 20.0


class Service(NamedTuple):
    """The parts of a running server.

    `summary` maps (info of the engine, port, seconds since the start) to the lines to print. It is
    called once the engine is ready.
    """

    engine: Engine
    app: FastAPI
    summary: Callable[[Any, int, float], str]

    async def settle(self) -> None:
        """Wait a little for what the summary says besides the engine."""
        media = getattr(self.app.state.serving, "media", None)
        if media is not None:
            await media.settle(_SETTLE_SECONDS)

    async def close(self) -> None:
        """End what the application of a fleet's model has started."""
        media = getattr(self.app.state.serving, "media", None)
        if media is not None:
            await media.close()
