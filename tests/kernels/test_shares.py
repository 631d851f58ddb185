"""How the panels of a product are shared by more threads than this machine has cores."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import PANEL

# Threads go through their items in step: nobody begins the next before all have one.
_SOURCE = r"""
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "shares.h"

void share(int threads, int count, int* done) {
  piecework::Shares shares(threads);
  std::mutex mutex;
  std::condition_variable changed;
  int active = threads, arrived = 0, round = 0;
  const auto advance = [&] {
    if (arrived < active) return;
    arrived = 0, ++round;
    changed.notify_all();
  };
  std::vector<std::thread> all;
  for (int me = 0; me < threads; ++me)
    all.emplace_back([&, me] {
      shares.each(me, threads, count, [&](int) {
        std::unique_lock lock(mutex);
        ++done[me], ++arrived;
        const int mine = round;
        advance();
        changed.wait(lock, [&] { return round != mine; });
      });
      const std::lock_guard lock(mutex);
      --active;
      if (active > 0) advance();
    });
  for (std::thread& thread : all) thread.join();
}

// Pairs of threads and items.
int main(int count, char** given) {
  for (int i = 1; i + 1 < count; i += 2) {
    std::vector<int> done(std::atoi(given[i]));
    share(done.size(), std::atoi(given[i + 1]), done.data());
    for (int each : done) std::printf("%d ", each);
    std::printf("\n");
  }
}
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "main.cpp").write_text(_SOURCE)
    command = ["g++", "-O1", "-std=c++17", "-pthread", f"-I{Path(build.__file__).parent}"]
    program = folder / "share"
    subprocess.run([*command, str(folder / "main.cpp"), "-o", str(program)], check=True)
    return program


# Rows of a layer's four products.
ROWS = {
    "SmolLM2": (960, 576, 3072, 576),
    "1B": (3072, 2048, 16384, 2048),
    "8B": (6144, 4096, 28672, 4096),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_no_thread_has_more_than_its_share_and_one(rows: tuple[int, ...], counted: Path) -> None:
    cases = [(threads, count // PANEL) for threads in (2, 16, 64) for count in rows]
    given = [str(number) for case in cases for number in case]
    text = subprocess.run([counted, *given], capture_output=True, text=True, check=True).stdout
    lines = [list(map(int, line.split())) for line in text.splitlines()]
    assert len(lines) == len(cases)
    for (threads, panels), done in zip(cases, lines, strict=True):
        assert sum(done) == panels, "every panel once"
        assert max(done) <= panels / threads + 1
