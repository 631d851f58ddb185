"""The limits of HTTP connections, and the number of connections that the machine allows."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.config.options import option

CONNECTIONS = "connections"
# File descriptors that are reserved for other things than connections: the engine's sockets, its
# restart, files and images.
_OWN_DESCRIPTORS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of what clients may use. Times are in seconds. Raises `ValueError`."""

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
    """Raise the limit of file descriptors and return how many connections it allows.

    Return None if there is no known limit.
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
            # macOS reports no hard limit but has one.
            pass
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, soft - min(_OWN_DESCRIPTORS, soft // 2))
