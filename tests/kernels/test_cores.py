"""Threads and memory by what the machine, the affinity mask and the control groups allow, on
made-up file systems.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from made_up_machine import Machine

from piecework.kernels.cpu import platform as cpu_platform
from piecework.kernels.cpu.machine import cores, host_memory
from piecework.kernels.cpu.machine.cgroups import cpu_quota, memory_limit
from piecework.kernels.cpu.machine.cores import Threads, choose_threads
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.memory_info import MemoryInfo

GIB = 2**30
V1_CPU = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


FOUR_PAIRS = ["0,4", "1,5", "2,6", "3,7"] * 2


def test_a_machine_of_plain_cores_gets_a_thread_for_each(machine: Machine) -> None:
    machine.cpus(["0", "1", "2", "3"])
    assert choose_threads(root=machine.root) == Threads(4, None)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_of_one_core_get_one_thread(machine: Machine, name: str) -> None:
    machine.cpus(FOUR_PAIRS, name=name)
    assert choose_threads(root=machine.root) == Threads(4, "8 CPUs are 4 cores")


@pytest.mark.parametrize(
    ("allowed", "count"), [({0, 1, 2, 3}, 4), ({0, 4}, 1), ({1, 2, 5}, 2), ({7}, 1)]
)
def test_a_mask_counts_the_cores_that_it_touches(
    machine: Machine, allowed: set[int], count: int
) -> None:
    machine.cpus(FOUR_PAIRS, allowed)
    found = choose_threads(root=machine.root)
    assert found.number == count and found.reason is not None
    assert found.reason.startswith(f"{len(allowed)} of 8 CPUs are allowed (taskset or cpuset)")


def test_cores_with_and_without_siblings_may_stand_side_by_side(machine: Machine) -> None:
    machine.cpus(["0-1", "0-1", "2-3", "2-3", "4", "5"])
    assert choose_threads(root=machine.root).number == 4


def test_where_the_kernel_hides_its_cores_each_cpu_is_one(machine: Machine) -> None:
    machine.cpus(["", "", "", ""])
    assert choose_threads(root=machine.root) == Threads(4, None)


@pytest.mark.parametrize(
    ("quota", "count"),
    [(50_000, 1), (150_000, 1), (190_000, 2), (250_000, 2), (300_000, 3), (900_000, 4)],
)
def test_threads_are_the_quota_to_the_nearest_and_at_least_one(
    machine: Machine, quota: int, count: int
) -> None:
    machine.cpus(["0", "1", "2", "3"])
    machine.groups("0::/app.slice", V2)
    machine.write("sys/fs/cgroup/app.slice/cpu.max", f"{quota} 100000")
    reason = None if count == 4 else f"the control group's CPU quota is {quota / 100_000}"
    assert choose_threads(root=machine.root) == Threads(count, reason)


def test_a_number_that_was_asked_for_is_taken_whatever_the_machine_is(machine: Machine) -> None:
    machine.cpus(FOUR_PAIRS, {0})
    assert choose_threads(3, root=machine.root) == Threads(3, "--num-threads 3, on 8 CPUs")
    assert choose_threads(8, root=machine.root) == Threads(8, None)


def test_without_affinity_masks_physical_cores_are_counted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.cpus(FOUR_PAIRS)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None if logical else 6)
    assert choose_threads(root=machine.root).number == 6


@pytest.mark.parametrize("own", ["a/b/c", "a/b", "a"])
def test_a_quota_above_the_own_group_holds_too(machine: Machine, own: str) -> None:
    machine.groups(f"0::/{own}", V2)
    machine.write("sys/fs/cgroup/a/cpu.max", "200000 100000")
    machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/a/b/c/cpu.max", "400000 100000")
    assert cpu_quota(machine.root) == 2.0


def test_version_1_has_a_hierarchy_for_cpu_time(machine: Machine) -> None:
    machine.groups("4:memory:/other\n3:cpu,cpuacct:/docker/abc\n0::/", V1_CPU, V1_MEMORY)
    folder = "sys/fs/cgroup/cpu,cpuacct/docker"
    machine.write(f"{folder}/cpu.cfs_quota_us", "-1")
    machine.write(f"{folder}/cpu.cfs_period_us", "100000")
    machine.write(f"{folder}/abc/cpu.cfs_quota_us", "75000")
    machine.write(f"{folder}/abc/cpu.cfs_period_us", "50000")
    assert cpu_quota(machine.root) == 1.5


def test_in_a_container_the_mount_begins_at_its_own_group(machine: Machine) -> None:
    machine.groups(
        "3:cpu,cpuacct:/docker/abc/inner", V1_CPU.replace(" / /sys", " /docker/abc /sys")
    )
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cpu_quota(machine.root) == 0.5


@pytest.mark.parametrize("own", ["0::/../../elsewhere", "0::/hidden/group"])
def test_a_group_that_cannot_be_seen_leaves_those_that_can(machine: Machine, own: str) -> None:
    machine.groups(own, V2)
    machine.write("sys/fs/cgroup/cpu.max", "300000 100000")
    assert cpu_quota(machine.root) == 3.0


def test_without_control_groups_nothing_limits(machine: Machine) -> None:
    assert cpu_quota(machine.root) is None and memory_limit(machine.root) is None
    machine.groups("0::/", V2)
    assert cpu_quota(machine.root) is None and memory_limit(machine.root) is None


def test_memory_is_what_the_tightest_group_leaves(machine: Machine) -> None:
    machine.groups("0::/a/b", V2)
    for group, limit, used in (("a", 8 * GIB, 7 * GIB), ("a/b", 4 * GIB, GIB)):
        machine.write(f"sys/fs/cgroup/{group}/memory.max", str(limit))
        machine.write(f"sys/fs/cgroup/{group}/memory.current", str(used))
        machine.write(
            f"sys/fs/cgroup/{group}/memory.stat",
            f"anon 5\nactive_file {GIB // 4}\ninactive_file {GIB // 4}",
        )
    assert memory_limit(machine.root) == MemoryInfo(free=3 * GIB // 2, total=4 * GIB)


def test_version_1_limits_memory_with_all_groups_below(machine: Machine) -> None:
    machine.groups("4:memory:/pod", V1_MEMORY)
    folder = "sys/fs/cgroup/memory/pod"
    machine.write(f"{folder}/memory.limit_in_bytes", str(2 * GIB))
    machine.write(f"{folder}/memory.usage_in_bytes", str(GIB))
    machine.write(
        f"{folder}/memory.stat",
        f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0",
    )
    assert memory_limit(machine.root) == MemoryInfo(free=3 * GIB // 2, total=2 * GIB)


def test_the_platform_s_memory_is_the_group_s_where_that_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=9 * GIB, total=16 * GIB)
    )
    for group, expected in (
        (None, (9, 16)),
        (MemoryInfo(2 * GIB, 4 * GIB), (2, 4)),
        (MemoryInfo(2**62, 2**62), (9, 16)),
    ):
        monkeypatch.setattr(host_memory, "memory_limit", lambda group=group: group)
        assert CpuPlatform().memory() == MemoryInfo(*(number * GIB for number in expected))


def test_the_platform_computes_with_as_many_threads_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    platform = CpuPlatform()
    for threads, remarks in ((Threads(2, "a quota"), {"threads": "2: a quota"}), (Threads(4), {})):
        monkeypatch.setattr(cpu_platform, "choose_threads", Mock(return_value=threads))
        platform.set_up(None)
        assert platform.remarks() == remarks
    assert chosen == [2, 4]


def test_this_machine_gets_between_one_thread_and_one_for_each_cpu() -> None:
    assert 1 <= choose_threads().number <= len(cores.allowed_cpus())
