"""The number of threads that compute: one per core that this process may use, within its
CPU quota.
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
# Files that name the CPUs of one core, for newer and for older kernels.
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")


class Threads(NamedTuple):
    """A number of threads. `reason` explains it if it is less than the machine's CPUs."""

    number: int
    reason: str | None = None


def choose_threads(
    asked: int | None = None,
    root: Path = _ROOT,
    *,
    ranks: int = 1,
    bound: Sequence[frozenset[int]] = (),
) -> Threads:
    """Return `asked` threads, or one per allowed physical core within the CPU quota, divided by the
    `ranks` of this machine.

    `root` is that of the file system; `bound` holds the CPUs of each rank.

    Two threads on one core share its vector units, which one thread of the kernels keeps busy.
    Ranks wait for one another, so all have as many threads as the rank with the fewest cores. With
    more threads than cores, ranks would wait for a core at every sum.
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
    """Round a quota to the nearest number of threads, halves down.

    One thread too many would use up the quota, which stops all threads and the web process for the
    rest of the period, usually 100 ms.
    """
    return max(1, math.ceil(quota - 0.5))


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this process may use. Without affinity masks, these are all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(allowed: Iterable[int], root: Path) -> int:
    """Return how many physical cores have one of these CPUs. A CPU without topology information
    counts as a core.
    """
    if not hasattr(os, "sched_getaffinity"):
        # macOS and Windows have neither Linux's files nor its masks.
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return len({siblings(cpu, root) or cpu for cpu in allowed})


def siblings(cpu: int, root: Path = _ROOT) -> str | None:
    """Return the kernel's list of the CPUs of this CPU's core, or None if there is none."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in _SIBLINGS:
        try:
            return (topology / name).read_text().strip()
        except OSError:
            continue
    return None
