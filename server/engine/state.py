"""What the HTTP side knows of any engine: where it stands, and why it takes no request."""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    """Where the engine process stands."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    """It was, and has not been heard of for half of the watchdog's time."""
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineUnavailable(Exception):
    """The engine is gone for good, or stopping; requests cannot be served."""


class QueueFull(Exception):
    """`--max-queued-requests` requests wait already. `retry_after`: seconds."""

    retry_after: int = 1
