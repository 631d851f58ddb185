"""Time slices of the engine's threads, read back from the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from piecework.runtime.process.slices import SLICE_NANOSECONDS, slice_nanoseconds

# A process of its own, because the tests' process keeps its slices.
_PROGRAM = """
import os, threading
from piecework.runtime.process.slices import shorten_slices, slice_nanoseconds
{before}
slices = []
shorten_slices()
thread = threading.Thread(target=lambda: slices.append(slice_nanoseconds()))
thread.start()
thread.join()
print(slice_nanoseconds(), *slices, os.getpriority(os.PRIO_PROCESS, 0))
"""

pytestmark = pytest.mark.skipif(slice_nanoseconds() == 0, reason="Linux tells slices from 6.12 on")


def run(before: str = "") -> list[int]:
    program = _PROGRAM.format(before=before)
    return list(map(int, subprocess.check_output([sys.executable, "-c", program]).split()))


def test_threads_have_short_slices_and_keep_their_niceness() -> None:
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert run("os.nice(3)") == [SLICE_NANOSECONDS, SLICE_NANOSECONDS, niceness]


def test_a_policy_that_the_user_chose_stays() -> None:
    own, of_thread, _ = run("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert SLICE_NANOSECONDS not in (own, of_thread)
