"""How many threads compute: one for each core that this process may use, and no more than its CPU
time feeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from .cgroups import cpu_quota

_ROOT = Path("/")
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
"""Files that name the CPUs of one core: that of today's kernels, and that of older ones."""


class Threads(NamedTuple):
    """A number of threads. `reason`: how it came about, where it is less than the machine's
    CPUs.
    """

    number: int
    reason: str | None = None


def choose_threads(
    asked: int | None = None,
    root: Path = _ROOT,
    *,
    ranks: int = 1,
    bound: Sequence[frozenset[int]] = (),
) -> Threads:
    """`asked`, or one thread for each physical core that is allowed, within the CPU quota; an equal
    part of them for each of the `ranks` of this machine. `root`: of the file system; `bound`: the
    CPUs of each rank.

    Two threads on one core share its vector units, which one thread of the kernels keeps busy.
    Ranks wait for one another, so all have as many threads as the one with the fewest cores, and
    none has more: they would wait for each other's turns on a core at every sum.
    """
    machine = os.cpu_count() or 1
    allowed = allowed_cpus()
    cores = _count_cores(allowed, root)
    own = min((_count_cores(cpus, root) for cpus in bound), default=max(1, cores // ranks))
    if asked is not None:
        most = min(map(len, bound), default=max(1, len(allowed) // ranks))
        if ranks > 1 and asked // ranks > most:
            return Threads(most, f"--num-threads {asked} is more than {ranks} ranks have CPUs for")
        split = f" for {ranks} ranks" if ranks > 1 else ""
        reason = f"--num-threads {asked}{split}, on {machine} CPUs"
        return Threads(max(1, asked // ranks), reason if asked < machine or split else None)
    quota = cpu_quota(root)
    count = min(own, own if quota is None else _whole(quota / ranks))
    reasons = {
        f"{len(allowed)} of {machine} CPUs are allowed (taskset or cpuset)": len(allowed) < machine,
        f"{len(allowed)} CPUs are {cores} cores": cores < len(allowed),
        f"{ranks} ranks share this machine": ranks > 1,
        f"the control group's CPU quota is {quota}": count < own,
    }
    return Threads(count, ", ".join(text for text, holds in reasons.items() if holds) or None)


def _whole(quota: float) -> int:
    """The nearest number of threads, of two as near the less.

    A thread more than the time is for stops all of them, and the web process, for the rest of each
    period of usually 100 ms.
    """
    return max(1, math.ceil(quota - 0.5))


def allowed_cpus() -> frozenset[int]:
    """Which this process may use: as many as the machine has where there are no masks."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(allowed: Iterable[int], root: Path) -> int:
    """Physical cores that have one of these CPUs; a CPU of which the kernel tells nothing is
    one.
    """
    if not hasattr(os, "sched_getaffinity"):
        # Neither Linux's files nor its masks: macOS, Windows.
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return len({siblings(cpu, root) or cpu for cpu in allowed})


def siblings(cpu: int, root: Path = _ROOT) -> str | None:
    """The CPUs of this one's core, as the kernel lists them; None where it tells nothing."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in _SIBLINGS:
        try:
            return (topology / name).read_text().strip()
        except OSError:
            continue
    return None
