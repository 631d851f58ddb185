"""Settings of connections: what one may hold, for how long, and how many there may be; and the room
that the machine has for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.config.options import option

CONNECTIONS = "connections"
_OWN_DESCRIPTORS = 256
"""File descriptors that are kept for everything but connections: the engine's sockets, a restart of
it, files, images.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds on what clients may hold. Times are in seconds. Raises `ValueError` with a remedy."""

    max_connections: int = option(
        4096,
        "maximum number of connections; at the limit, a new connection closes the one that is "
        "idle for longest, or gets 503 if none is idle; /health, /ready and /metrics are always "
        "answered",
        group=CONNECTIONS,
        metavar="N",
    )
    max_header_bytes: int = option(
        32768,
        "maximum size of a request's headers together, and of its URL; beyond it 431 or 414",
        group=CONNECTIONS,
        metavar="BYTES",
    )
    max_header_count: int = option(
        100, "maximum number of headers; beyond it 431", group=CONNECTIONS, metavar="N"
    )
    max_unfinished_bodies: int = option(
        128,
        "maximum size of all bodies that are still arriving, in MiB; beyond it the oldest gets 503",
        group=CONNECTIONS,
        metavar="MIB",
    )
    timeout_header: float = option(
        20.0,
        "seconds from a request's first byte to the end of its headers",
        group=CONNECTIONS,
        metavar="SECONDS",
    )
    timeout_body: float = option(
        20.0,
        "seconds after which a body that is still arriving must keep --min-transfer-rate",
        group=CONNECTIONS,
        metavar="SECONDS",
    )
    timeout_write: float = option(
        60.0,
        "seconds after which a client that is still reading must keep --min-transfer-rate",
        group=CONNECTIONS,
        metavar="SECONDS",
    )
    timeout_keep_alive: float = option(
        75.0,
        "seconds that a connection may stay open without a request",
        group=CONNECTIONS,
        metavar="SECONDS",
    )
    min_transfer_rate: int = option(
        1000,
        "bytes per second for bodies and answers that take longer than their timeout",
        group=CONNECTIONS,
        metavar="N",
    )

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_header_count", "max_unfinished_bodies"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.max_header_bytes < 1024:
            raise ValueError(
                "--max-header-bytes must be at least 1024, because ordinary headers need that, got "
                f"{self.max_header_bytes}"
            )
        if self.min_transfer_rate < 0:
            raise ValueError(
                f"--min-transfer-rate must be at least 0, got {self.min_transfer_rate}"
            )
        for name in ("timeout_header", "timeout_body", "timeout_write", "timeout_keep_alive"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"--{_flag(name)} must be more than 0 seconds, got {getattr(self, name)}"
                )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def room_for_connections() -> int | None:
    """How many connections the process has file descriptors for, once its own limit is raised as
    far as it may; None: no limit is known.
    """
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            # macOS tells of no bound and has one.
            pass
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, soft - min(_OWN_DESCRIPTORS, soft // 2))
