"""CPU time and memory that the control groups of this process allow, for version 1 and version 2.

A limit of any parent group holds too, so all visible groups are read. In a container the folders
above its own are hidden. If nothing is mounted, there is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...memory_info import MemoryInfo

_ROOT = Path("/")
# Keys of memory.stat: bytes that count as used, but that the kernel frees when memory is needed.
_FILE_CACHE = {"active_file", "inactive_file"}


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return how many CPUs' worth of time this process gets, or None without a limit. `root` is
    that of the file system.
    """
    quotas = [_quota(folder) for folder in _groups("cpu", root)]
    return min([quota for quota in quotas if quota is not None], default=None)


def memory_limit(root: Path = _ROOT) -> MemoryInfo | None:
    """Return the smallest memory limit of this process, and the smallest rest of any limit. None
    without a limit.
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
        return None  # "max", or the files do not exist.
    return quota / period if quota > 0 and period > 0 else None


def _limit(folder: Path) -> MemoryInfo | None:
    # Above memory.high a group is slowed down until it nearly stops.
    totals = [
        _number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    total = min([total for total in totals if total is not None], default=None)
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if total is None or used is None:
        return None
    return MemoryInfo(max(0, total - used + _reclaimable(folder)), total)


def _reclaimable(folder: Path) -> int:
    """Return the reclaimable bytes. In version 1, the limit applies to the `total_...` values,
    which include child groups.
    """
    figures = dict(
        line.split()
        for line in _read(folder / "memory.stat").splitlines()
        if len(line.split()) == 2
    )
    return sum(int(figures.get(f"total_{name}", figures.get(name, 0))) for name in _FILE_CACHE)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and their parents, in each hierarchy that may
    limit `controller`.
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
    """Yield the folders of `group` and its parents under the mount point, which shows the hierarchy
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
    """Return the text of a file, or "" if it does not exist or cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
