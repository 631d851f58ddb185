"""The states of an engine, and the errors that refuse a request."""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    """The state of an engine process."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"  # Was READY, and silent for half of the watchdog's limit.
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class EngineUnavailable(Exception):
    """The engine has failed or is stopping, so requests cannot be served."""


class QueueFull(Exception):
    """`--max-queued-requests` requests are already waiting. `retry_after` is in seconds."""

    retry_after: int = 1
