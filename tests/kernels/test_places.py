"""Threads of a team that the system has put on one CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from piecework.kernels.cpu.native import build

# Threads 0 and 1 meet on the first CPU given; then thread 0 may be on all of them. What it is told,
# whether it moved, on how many CPUs it may be.
_SOURCE = r"""
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "places.h"

void allow(int count, char** cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < count; ++i) CPU_SET(std::atoi(cpus[i]), &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) std::abort();
}

int main(int count, char** given) {
  piecework::Places places(3);  // one has not begun
  std::thread([&] { allow(1, given + 1), places.tell(1); }).join();
  allow(1, given + 1);
  if (count > 2) allow(count - 1, given + 1);
  const bool met = sched_getcpu() == std::atoi(given[1]);
  const bool shared = places.part(0, 3);
  const bool away = sched_getcpu() != std::atoi(given[1]);
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::printf("%d %d %d %d", met, shared, away, CPU_COUNT(&allowed));
}
"""
MASKS = hasattr(os, "sched_getaffinity")
CPUS = sorted(os.sched_getaffinity(0)) if MASKS else []
pytestmark = pytest.mark.skipif(not MASKS, reason="threads are bound to CPUs on Linux alone")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    (folder / "main.cpp").write_text(_SOURCE)
    command = ["g++", "-O1", "-std=c++17", "-pthread", f"-I{Path(build.__file__).parent}"]
    subprocess.run([*command, str(folder / "main.cpp"), "-o", str(folder / "part")], check=True)
    return folder / "part"


def part(program: Path, cpus: list[int]) -> list[int]:
    words = [str(program), *map(str, cpus)]
    return list(map(int, subprocess.check_output(words, text=True).split()))


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU is no two")
def test_one_of_two_threads_on_a_cpu_goes_to_another_and_stays_free(program: Path) -> None:
    """Also where the system had moved it already, it is away from the other one."""
    _, shared, away, allowed = part(program, CPUS[:2])
    assert (shared, away, allowed) == (0, 1, 2)


def test_threads_that_have_one_cpu_together_know_it(program: Path) -> None:
    assert part(program, CPUS[:1]) == [1, 1, 0, 1]
