"""Settings of the tiers below the KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .options import option

TIERS = "tiers of the prefix cache"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_DEFAULT_DISK = 16 << 30
LEAST_BYTES = 16 << 20


class DiskTier(NamedTuple):
    """A folder, and the bytes that its files may take."""

    folder: Path
    max_bytes: int

    @classmethod
    def parse(cls, text: str) -> DiskTier:
        """Read PATH or PATH:SIZE. Raise `ValueError`."""
        path, colon, size = text.rpartition(":")
        if not colon or not _SIZE.fullmatch(size):
            path, size = text, ""
        if not path.strip():
            raise ValueError(f"--kv-disk {text!r} names no folder; give PATH or PATH:SIZE")
        most = parse_size(size, "--kv-disk") if size else _DEFAULT_DISK
        return cls(Path(path).expanduser(), most)


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Where blocks of the KV cache go when they are evicted. A part of `EngineConfig`."""

    kv_host_memory: str | None = option(
        None,
        "memory of the host (8G) that keeps what the KV cache of a device evicts; on a CPU the KV "
        "cache itself is there; default: none",
        group=TIERS,
        metavar="SIZE",
    )
    kv_disk: str | None = option(
        None,
        "folder that keeps what the KV cache evicts, also after the server's end, and for other "
        "servers of the same model; it takes at most SIZE (64G; default: 16G); default: none",
        group=TIERS,
        metavar="PATH[:SIZE]",
    )

    def check_tiers(self, ranks: int) -> None:
        """Raise `ValueError` for a value that cannot be read, or that several ranks exclude."""
        if self.kv_disk is not None:
            DiskTier.parse(self.kv_disk)
        if self.kv_host_memory is not None:
            parse_size(self.kv_host_memory, "--kv-host-memory")
        given = [name for name in ("kv_disk", "kv_host_memory") if getattr(self, name) is not None]
        if given and ranks > 1:
            flag = f"--{given[0].replace('_', '-')}"
            raise ValueError(f"{flag} needs an engine of one rank: leave it or --tp-size out")


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of a size such as 512M or 8G. Raise `ValueError`."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < LEAST_BYTES:
        raise ValueError(f"{flag}: {text!r} is no size of at least 16M; give one like 512M or 8G")
    return size
