"""The states of an engine, and the errors that refuse a request."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EngineState(StrEnum):
    """The state of an engine process."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"  # Was READY, and silent for half of the watchdog's limit.
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Progress(NamedTuple):
    """What an engine does before it serves, or before it serves at full speed.

    `retry_after` is the number of seconds after which a client should try again.
    """

    phase: str
    retry_after: int


class EngineUnavailable(Exception):
    """The engine is starting, has failed or is stopping, so requests cannot be served."""

    def __init__(self, message: str, progress: Progress | None = None) -> None:
        super().__init__(message)
        self.progress = progress


class QueueFull(Exception):
    """`--max-queued-requests` requests are already waiting. `retry_after` is in seconds."""

    retry_after: int = 1
