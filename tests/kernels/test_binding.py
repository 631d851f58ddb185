"""Which cores ranks are bound to, on made-up machines; and that threads follow, on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_machine import Machine

from piecework.kernels.cpu.machine import binding
from piecework.kernels.cpu.machine.binding import split_cores
from piecework.kernels.cpu.machine.core_lists import check_lists, parse_lists
from piecework.kernels.cpu.machine.cores import Threads, choose_threads

THREADS_FOLLOW = """
import os, threading
from piecework.kernels.cpu.machine.binding import bind

gone = threading.Event()
before = threading.Thread(target=gone.wait)
before.start()
only = frozenset([max(os.sched_getaffinity(0))])
assert bind(only, "auto") is None
masks = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
after = []
thread = threading.Thread(target=lambda: after.append(frozenset(os.sched_getaffinity(0))))
thread.start()
thread.join()
gone.set()
assert masks | set(after) == {only}, (masks, after)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def nodes(machine: Machine, *lists: str) -> None:
    for number, text in enumerate(lists):
        machine.write(f"sys/devices/system/node/node{number}/cpulist", text)


def parts(machine: Machine, ranks: int, lists: str = "auto") -> list[set[int]]:
    return [set(part) for part in split_cores(lists, ranks, machine.root)[0]]


def test_a_rank_gets_a_numa_node(machine: Machine) -> None:
    machine.cpus([str(cpu) for cpu in range(8)])
    nodes(machine, "0-3", "4-7")
    assert parts(machine, 2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert parts(machine, 4) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_a_rank_gets_several_nodes_where_there_are_more_of_them(machine: Machine) -> None:
    machine.cpus([str(cpu) for cpu in range(8)])
    nodes(machine, "0,4", "1,5", "2,6", "3,7")
    assert parts(machine, 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]


def test_a_node_that_this_process_may_not_use_gets_no_rank(machine: Machine) -> None:
    machine.cpus([str(cpu) for cpu in range(8)], {4, 5, 6, 7})
    nodes(machine, "0-3", "4-7", "")
    assert parts(machine, 2) == [{4, 5}, {6, 7}]


def test_both_threads_of_a_core_go_to_one_rank(machine: Machine) -> None:
    machine.cpus(["0,4", "1,5", "2,6", "3,7"] * 2)
    assert parts(machine, 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert choose_threads(
        root=machine.root, ranks=2, bound=split_cores("auto", 2, machine.root)[0]
    ) == Threads(2, "8 CPUs are 4 cores, 2 ranks share this machine")


def test_ranks_share_a_core_where_there_are_fewer_and_are_told_so(machine: Machine) -> None:
    machine.cpus(["0", "1"], {1})
    assert split_cores("auto", 2, machine.root) == (
        (frozenset([1]), frozenset([1])),
        "1 | 1, which ranks share",
    )
    assert choose_threads(root=machine.root, ranks=2).number == 1


def test_ranks_compute_with_no_more_threads_than_they_have_cpus_for(machine: Machine) -> None:
    machine.cpus(["0", "1"])
    assert choose_threads(4, machine.root, ranks=2) == Threads(
        1, "--num-threads 4 is more than 2 ranks have CPUs for"
    )
    assert choose_threads(2, machine.root, ranks=2).number == 1


@given(cores=st.integers(1, 40), ranks=st.integers(1, 50))
def test_parts_are_even_and_all_cores_are_used(cores: int, ranks: int) -> None:
    found = binding._even([frozenset([core]) for core in range(cores)], ranks)
    sizes = [len(part) for part in found]
    assert len(found) == ranks and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    if ranks <= cores:
        assert sorted(cpu for part in found for cpu in part) == list(range(cores))


def test_lists_name_the_cores_of_each_rank() -> None:
    assert parse_lists("0-1,2-3", 2) == (frozenset([0, 1]), frozenset([2, 3]))
    assert parse_lists("0-1,8|2-3,9", 2) == (frozenset([0, 1, 8]), frozenset([2, 3, 9]))
    assert parse_lists("0-1,8", 1) == (frozenset([0, 1, 8]),)


@pytest.mark.parametrize("text", ["", "0-", "3-1", "a", "0,,1", "0|", "-1", "0-999999", "auto,0"])
def test_a_list_of_no_cores_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"--cpu-bind.*not a range of CPUs"):
        check_lists(text)


def test_a_list_for_another_number_of_ranks_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"lists cores for 2 ranks, but this machine has 4"):
        parse_lists("0-15,16-31", 4)


def test_one_rank_is_bound_only_where_that_is_asked_for(machine: Machine) -> None:
    machine.cpus(["0", "1"])
    assert parts(machine, 1) == [] and parts(machine, 2, "none") == []
    assert parts(machine, 1, "1") == [{1}]


def test_cores_that_cannot_be_had_are_one_line_and_auto_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    with pytest.raises(
        ValueError, match=r"--cpu-bind 5,6: CPUs 5 are not available .*not permitted"
    ):
        binding.bind(frozenset([5]), "5,6")
    assert binding.bind(frozenset([5]), "auto") == ("not bound: [Errno 1] Operation not permitted")


def test_where_no_process_can_be_bound_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert split_cores("auto", 2) == ((), None)
    with pytest.raises(ValueError, match="this system cannot bind a process to cores"):
        split_cores("0,1", 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_threads_that_are_there_and_those_that_come_are_bound() -> None:
    subprocess.run([sys.executable, "-c", THREADS_FOLLOW], check=True)
