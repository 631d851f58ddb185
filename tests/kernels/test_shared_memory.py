"""How ranks find their shared memory, and what they learn of one another when they do not meet."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_ranks import at_once, shared_groups
from torch.distributed import FileStore, HashStore

from piecework.kernels.collectives import CollectiveError
from piecework.kernels.cpu import shared_memory
from piecework.kernels.cpu.native.shared import SharedMemoryGroup
from piecework.kernels.cpu.shared_memory import NoSharedMemory, shared_memory_group


@pytest.mark.parametrize("cores", ["each its own", "one, unknown", "one, known"])
def test_nobody_is_left_asleep(cores: str) -> None:
    """Ranks come late by random times, around those after which the others look less often."""
    groups = shared_groups(2, seconds=10, is_crowded=cores == "one, known")
    cpu = min(os.sched_getaffinity(0))

    def run(rank: int) -> int:
        if cores != "each its own":
            os.sched_setaffinity(0, {cpu})  # this thread's alone
        late, total = random.Random(rank), 0
        for number in range(300):
            if late.random() < 0.2:
                time.sleep(late.choice([0, 1e-4, 1e-3, 3e-3]))
            total += int(groups[rank].all_reduce(torch.tensor([number + rank])))
        return total

    assert at_once(2, run) == [sum(2 * number + 1 for number in range(300))] * 2


def failures(groups: list[SharedMemoryGroup], *collectives: str) -> list[str]:
    """What each rank is told that takes part in its own collective; "": none."""

    def run(rank: int) -> str:
        if not collectives[rank]:
            return ""
        with pytest.raises(CollectiveError) as told:
            getattr(groups[rank], collectives[rank])(torch.ones(4, 3))
        return str(told.value)

    return at_once(len(groups), run)


def test_ranks_in_different_collectives_are_told_both() -> None:
    groups = shared_groups(2)
    at_once(2, lambda rank: groups[rank].all_reduce(torch.ones(2)))
    first, second = failures(groups, "all_reduce", "all_gather")
    sums, moves = "all_reduce no. 2 of 12 float32", "all_gather no. 2 of 48 bytes"
    assert f"rank 0 is in {sums}, rank 1 in {moves}" in first
    assert f"rank 1 is in {moves}, rank 0 in {sums}" in second


def test_a_rank_that_does_not_come_is_named_with_what_it_came_to() -> None:
    groups = shared_groups(3, seconds=0.2)
    at_once(3, lambda rank: groups[rank].all_reduce(torch.ones(2)))
    began = time.monotonic()
    told = failures(groups, "all_gather", "all_gather", "")
    assert time.monotonic() - began >= 0.2
    assert "in all_gather no. 2 of 48 bytes" in told[0]
    late = "where rank 2 did not come within 0.2 s (--dist-timeout); rank 2 has come to all_reduce"
    assert any(f"{late} no. 1" in line for line in told[:2])
    assert groups[0].last_calls()[2] == "all_reduce no. 1 of 2 float32"
    # Nothing goes on after that, on a rank that comes too late either.
    with pytest.raises(CollectiveError):
        groups[0].all_reduce(torch.ones(2))
    assert "has given up" in failures(groups, "", "", "all_gather")[2]


def test_giving_up_ends_the_others_wait() -> None:
    groups = shared_groups(2, seconds=1000)

    def run(rank: int) -> None:
        if rank == 1:
            time.sleep(0.1)
            groups[1].give_up()
        else:
            groups[0].all_reduce(torch.ones(2))

    with pytest.raises(CollectiveError, match="rank 1 has given up"):
        at_once(2, run)


_RANK_1 = """
import sys, torch
from torch.distributed import FileStore
from piecework.kernels.cpu.shared_memory import shared_memory_group
group = shared_memory_group(FileStore(sys.argv[1]), 1, 2, seconds=30)
for _ in range(3):
    group.all_reduce(torch.ones(5))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_leaves_nothing_but_its_name(tmp_path: Path) -> None:
    path, before = str(tmp_path / "store"), set(os.listdir("/dev/shm"))
    child = subprocess.Popen(
        [sys.executable, "-c", _RANK_1, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    group = shared_memory_group(FileStore(path), 0, 2, seconds=2)
    for _ in range(3):
        assert group.all_reduce(torch.ones(5)).tolist() == [2] * 5
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    assert set(os.listdir("/dev/shm")) <= before
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(CollectiveError, match=r"all_reduce no\. 4 .* rank 1 did not come"):
        group.all_reduce(torch.ones(5))


def meet(size: int) -> list[Any]:
    """Each rank's group, or why there is none."""
    store = HashStore()

    def run(rank: int) -> Any:
        try:
            return shared_memory_group(store, rank, size, seconds=5)
        except (NoSharedMemory, ValueError) as error:
            return type(error), str(error)

    return at_once(size, run)


def test_without_the_means_every_rank_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {type(each) for each in meet(3)} == {SharedMemoryGroup}
    with monkeypatch.context() as lacking:
        lacking.delattr(os, "memfd_create")
        told = "rank 0: this system has no memfd_create"
        assert meet(2) == [(NoSharedMemory, told)] * 2
    with monkeypatch.context() as lacking:
        lacking.setattr(shared_memory, "load_kernels", lambda: None)
        told = "rank 0: the C++ kernels cannot be built"
        assert meet(2) == [(NoSharedMemory, told)] * 2
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getpid", lambda: 2**22 + 1)
        first, second = meet(2)
        assert first == second and "rank 0's memory cannot be opened" in str(first)


def test_a_file_of_another_process_is_not_taken_for_rank_0s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the same number on another machine has other files, and other memory."""
    message, link = shared_memory._Offer.message, tmp_path / "link"
    for other in ({"token": 64 * "0"}, {"length": 4096}, {"path": str(link)}):
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
        monkeypatch.setattr(
            shared_memory._Offer, "message", lambda offer, other=other: message(offer) | other
        )
        assert meet(2) == [(NoSharedMemory, "rank 1: rank 0 runs on another machine")] * 2


def test_ranks_with_different_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["avx2-0.so", "avx512-1.so"])
    monkeypatch.setattr(shared_memory, "_name_of", lambda library: next(names))
    for kind, told in meet(2):
        assert kind is ValueError and "rank 1 has other CPU kernels than rank 0" in told
