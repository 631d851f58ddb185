"""Time slices of the engine's threads, read back from the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from piecework.runtime.process import slices
from piecework.runtime.process.slices import SLICE_NANOSECONDS, shorten_slices, slice_nanoseconds

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

needs_slices = pytest.mark.skipif(
    slice_nanoseconds() == 0, reason="Linux tells slices from 6.12 on"
)


def run(before: str = "") -> list[int]:
    program = _PROGRAM.format(before=before)
    return list(map(int, subprocess.check_output([sys.executable, "-c", program]).split()))


@needs_slices
def test_threads_have_short_slices_and_keep_their_niceness() -> None:
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert run("os.nice(3)") == [SLICE_NANOSECONDS, SLICE_NANOSECONDS, niceness]


@needs_slices
def test_a_policy_that_the_user_chose_stays() -> None:
    own, of_thread, _ = run("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert SLICE_NANOSECONDS not in (own, of_thread)


@pytest.mark.parametrize("refused", ["set", "get and set", "another processor"])
def test_a_system_that_refuses_keeps_its_slices(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Call numbers that no system has are refused with ENOSYS, others by a sandbox with EPERM."""
    before, none = slice_nanoseconds(), 99_999
    _, get = slices._CALLS.get(platform.machine(), (none, none))
    calls = {"set": (none, get), "get and set": (none, none)}
    kept = {platform.machine(): calls[refused]} if refused in calls else {}
    with monkeypatch.context() as patched:
        patched.setattr(slices, "_CALLS", kept)
        shorten_slices()
        assert slice_nanoseconds() == (before if refused == "set" else 0)
    assert slice_nanoseconds() == before
