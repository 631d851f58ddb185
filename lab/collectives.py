"""All-reduce of several CPU processes by message size, through shared memory and through gloo:

python -m piecework.lab.collectives --ranks 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ..kernels.collectives import Group, TorchGroup
from ..kernels.cpu.shared_memory import NoSharedMemory, shared_memory_group

_SIZES = tuple(4096 * 4**power for power in range(7))
"""Bytes: 4 kB to 16 MB."""
_SECONDS = 60.0
_BATCH_SECONDS = 0.01
"""How long the calls take that are timed together."""


def all_reduce_times(
    ranks: int, threads: int, dtype: torch.dtype, rounds: int
) -> dict[int, dict[str, float]]:
    """Microseconds of one all-reduce by bytes of its message and kind of group: the least of so
    many rounds, in which the kinds take turns. Raises `NoSharedMemory`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        jobs = [(rank, ranks, threads, dtype, rounds, folder) for rank in range(ranks)]
        return pool.starmap(_on_rank, jobs, chunksize=1)[0]


def _on_rank(
    rank: int, ranks: int, threads: int, dtype: torch.dtype, rounds: int, folder: str
) -> dict[int, dict[str, float]]:
    torch.set_num_threads(threads)
    _bind(rank, ranks, threads)
    store = FileStore(str(Path(folder) / "gloo"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    groups: dict[str, Group] = {
        "shared memory": shared_memory_group(
            FileStore(str(Path(folder) / "memory"), ranks), rank, ranks, seconds=_SECONDS
        ),
        "gloo": TorchGroup(dist.group.WORLD, store, _SECONDS),
    }
    found: dict[int, dict[str, float]] = {}
    for size in _SIZES:
        x = torch.ones(size // dtype.itemsize, dtype=dtype)
        counts = {name: _calls_at_once(group, x) for name, group in groups.items()}
        times = {name: float("inf") for name in groups}
        for _ in range(rounds):
            for name, group in groups.items():
                times[name] = min(times[name], _seconds(group, x, counts[name]))
        found[size] = {name: 1e6 * seconds for name, seconds in times.items()}
    dist.destroy_process_group()
    return found


def _calls_at_once(group: Group, x: torch.Tensor) -> int:
    """As many as take about as long as is timed together; the same on every rank."""
    _seconds(group, x, 2)
    count = torch.tensor([max(1, int(_BATCH_SECONDS / _seconds(group, x, 5)))])
    group.broadcast(count)
    return int(count)


def _seconds(group: Group, x: torch.Tensor, calls: int) -> float:
    """Of one call, of several in a row that all ranks begin together."""
    group.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    for _ in range(calls):
        group.all_reduce(x)
    return (time.perf_counter() - began) / calls


def _bind(rank: int, ranks: int, threads: int) -> None:
    """To cores of its own, where there are enough."""
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) >= ranks * threads:
            os.sched_setaffinity(0, cpus[rank * threads : (rank + 1) * threads])


def table(times: dict[int, dict[str, float]]) -> str:
    """As Markdown."""
    lines = ["| message | shared memory | gloo | gloo / shared memory |", "|---|---|---|---|"]
    for size, each in times.items():
        shared, gloo = each["shared memory"], each["gloo"]
        name = f"{size // 1024} kB" if size < 2**20 else f"{size // 2**20} MB"
        lines.append(f"| {name} | {shared:.1f} µs | {gloo:.1f} µs | {gloo / shared:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    try:
        found = all_reduce_times(
            given.ranks, given.threads, getattr(torch, given.dtype), given.rounds
        )
    except NoSharedMemory as error:
        parser.error(str(error))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
