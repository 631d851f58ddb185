"""The settings of the supervision of an engine process."""

from __future__ import annotations

import subprocess
from typing import Protocol, TypedDict


class ServerSettings(Protocol):
    """The settings of a server that concern the supervision of its engine."""

    @property
    def max_queued_requests(self) -> int: ...

    @property
    def log_level(self) -> str: ...

    @property
    def watchdog_timeout(self) -> float: ...


class SupervisorSettings(TypedDict, total=False):
    """The keyword arguments that every engine client passes to its supervisor."""

    max_queued_requests: int
    log_level: str
    watchdog_timeout: float
    process: subprocess.Popen[bytes] | None


def settings_of(
    config: ServerSettings, process: subprocess.Popen[bytes] | None
) -> SupervisorSettings:
    """Return the supervisor's settings of a server's config."""
    return SupervisorSettings(
        max_queued_requests=config.max_queued_requests,
        log_level=config.log_level,
        watchdog_timeout=config.watchdog_timeout,
        process=process,
    )
