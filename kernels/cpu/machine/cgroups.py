"""What the control groups of this process allow it: CPU time and memory, by version 1 and version 2
alike.

A limit of any group above holds too, so all of them are read, as far as they can be seen: in a
container the folders above its own are hidden, and where nothing is mounted at all nothing limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...memory_info import MemoryInfo

_ROOT = Path("/")
_FILE_CACHE = {"active_file", "inactive_file"}
"""Of memory.stat: bytes that count as used, and that the kernel gives back when they are wanted."""


def cpu_quota(root: Path = _ROOT) -> float | None:
    """How many CPUs' worth of time this process gets, None where that is not limited. `root`: of
    the file system.
    """
    quotas = [_quota(folder) for folder in _groups("cpu", root)]
    return min([quota for quota in quotas if quota is not None], default=None)


def memory_limit(root: Path = _ROOT) -> MemoryInfo | None:
    """The least limit of this process's memory, and the least that is left of any; None where there
    is none.
    """
    limits = [limit for folder in _groups("memory", root) if (limit := _limit(folder)) is not None]
    return (
        MemoryInfo(min(limit.free for limit in limits), min(limit.total for limit in limits))
        if limits
        else None
    )


def _quota(folder: Path) -> float | None:
    text = (
        _read(folder / "cpu.max")
        or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    )
    try:
        quota, period = map(int, text.split())
    except ValueError:
        return None  # "max", or no such files.
    return quota / period if quota > 0 and period > 0 else None


def _limit(folder: Path) -> MemoryInfo | None:
    # Above memory.high a group is slowed down until nothing moves.
    totals = [
        _number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    total = min([total for total in totals if total is not None], default=None)
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if total is None or used is None:
        return None
    return MemoryInfo(max(0, total - used + _reclaimable(folder)), total)


def _reclaimable(folder: Path) -> int:
    """Version 1 has a group's own figures and, under `total_...`, those with all groups below it,
    which its limit is for.
    """
    figures = dict(
        line.split()
        for line in _read(folder / "memory.stat").splitlines()
        if len(line.split()) == 2
    )
    return sum(int(figures.get(f"total_{name}", figures.get(name, 0))) for name in _FILE_CACHE)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's groups and of those above them, in each hierarchy that may limit
    `controller`.
    """
    own: dict[str, PurePosixPath] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        shown, point = mount.split()[3:5]
        kind, _, options = filesystem.split(maxsplit=2)
        name = "" if kind == "cgroup2" else controller
        if name in own and (
            kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
        ):
            yield from _upwards(root / point.lstrip("/"), own[name], PurePosixPath(shown))


def _upwards(point: Path, group: PurePosixPath, shown: PurePosixPath) -> Iterator[Path]:
    """The folders of `group` and of those above it under the mount point, which shows the hierarchy
    from `shown` on.
    """
    inside = (
        group.relative_to(shown)
        if group.is_relative_to(shown) and ".." not in group.parts
        else PurePosixPath()
    )
    for path in (inside, *inside.parents):
        if (point / path).is_dir():
            yield point / path


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """Nothing where the file is not there or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
