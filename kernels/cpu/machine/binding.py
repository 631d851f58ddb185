"""The cores on which each rank of this machine computes (`--cpu-bind`): a NUMA node per rank if
there are several nodes, otherwise an equal part of the cores that this process may use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from .core_lists import parse_list, parse_lists, write_list
from .cores import allowed_cpus, siblings

_ROOT = Path("/")
_TASKS = Path("/proc/self/task")


def split_cores(
    lists: str, ranks: int, root: Path = _ROOT
) -> tuple[tuple[frozenset[int], ...], str | None]:
    """Return the CPUs of each of `ranks` (empty if ranks are not bound), and a remark for the
    start-up summary or None.

    `lists` is "auto", "none", or a list of CPUs per rank (`parse_lists`). `root` is that of the
    file system. Raise `ValueError` with a remedy.
    """
    if lists == "none" or (lists == "auto" and ranks == 1):
        return (), None
    if not hasattr(os, "sched_setaffinity"):
        if lists == "auto":
            return (), None
        raise ValueError(
            f"--cpu-bind {lists}: this system cannot bind a process to cores; omit --cpu-bind"
        )
    parts = _parts(ranks, root) if lists == "auto" else parse_lists(lists, ranks)
    shared = len(frozenset().union(*parts)) < sum(map(len, parts))
    text = " | ".join(write_list(part) for part in parts)
    return parts, f"{text}{', which ranks share' if shared else ''}"


def bind(cpus: frozenset[int], lists: str) -> str | None:
    """Bind all threads of this process, and the threads that they start, to `cpus`. Return why that
    failed, or None.

    If `lists` names the CPUs, a failure raises `ValueError` instead.
    """
    try:
        # Bind the calling thread first, which shows whether binding is allowed.
        os.sched_setaffinity(0, cpus)
        if had := cpus - os.sched_getaffinity(0):
            raise OSError(f"this process may not use CPU {write_list(had)}")
        for thread in _TASKS.iterdir() if _TASKS.is_dir() else ():
            with contextlib.suppress(ProcessLookupError):  # The thread has ended.
                os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:
        if lists == "auto":
            return f"not bound: {error}"
        raise ValueError(
            f"--cpu-bind {lists}: CPUs {write_list(cpus)} are not available ({error}); choose "
            f"from the CPUs that this process may use ({write_list(allowed_cpus())}), auto or none"
        ) from None
    return None


def _parts(ranks: int, root: Path) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each rank. Ranks stay within a NUMA node, or have whole nodes, if the
    numbers allow it.
    """
    allowed = allowed_cpus()
    nodes = _nodes(allowed, root)
    if ranks % len(nodes) == 0:
        each = ranks // len(nodes)
        return tuple(part for node in nodes for part in _even(_cores(node, root), each))
    if len(nodes) % ranks == 0:
        each = len(nodes) // ranks
        return tuple(
            frozenset().union(*nodes[each * rank : each * rank + each]) for rank in range(ranks)
        )
    return _even([core for node in nodes for core in _cores(node, root)], ranks)


def _even(cores: Sequence[frozenset[int]], ranks: int) -> tuple[frozenset[int], ...]:
    """Split neighbouring cores evenly. With fewer cores than ranks, several ranks share a core."""
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return tuple(
        frozenset().union(*cores[first : max(first + 1, last)]) for first, last in pairwise(bounds)
    )


def _nodes(allowed: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Return the allowed CPUs of each NUMA node that has some, or one node if the kernel reports
    none.
    """
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = [
        _read(folder / "cpulist") & allowed
        for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("node")))
    ]
    nodes = [node for node in found if node]
    return nodes if frozenset().union(*nodes) == allowed else [allowed]


def _read(file: Path) -> frozenset[int]:
    """Return the CPUs in a file of the kernel. Empty for a node that has only memory."""
    try:
        text = file.read_text().strip()
        return parse_list(text, text) if text else frozenset()
    except (OSError, ValueError):
        return frozenset()


def _cores(cpus: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Return the CPUs of each core, in the order of their first CPUs."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(siblings(cpu, root) or str(cpu), set()).add(cpu)
    return [frozenset(core) for core in cores.values()]
