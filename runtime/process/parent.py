"""A process that ends when the one that started it does, however that ends: its standard input is a
pipe that the parent holds open, after one line, the job.

`python -m piecework.runtime.process.parent MODULE ...` runs MODULE as a program that ends so even
where it is stopped while it imports; with `--no-job` before it one that is sent nothing, and that
any thread may start, also one that ends before it does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_OBJECTS_A_COLLECTION = 50_000
"""Not Python's 700."""
ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "KINETO_LOG_LEVEL": "99"}
"""libgomp's threads spin for milliseconds before they sleep, by default: whatever else needs a core
waits for them, and they for it. torch's profiler prints lines of its own beside the log. Read when
torch is loaded; what the user has set comes first.
"""


def read_line() -> bytes:
    """The first line of the standard input. Ends the process where there will be none."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 2**16)
        if not part:
            os._exit(1)
        line += part
    return line


def end_with_parent() -> None:
    """From now on. Whatever else the parent writes into the pipe must have been read before."""
    threading.Thread(target=_watch, name="parent", daemon=True).start()


def killed_with_parent() -> None:
    """On Linux the kernel kills this process when the thread that started it ends: also where it is
    stopped, and does nothing any more. See prctl(2).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch() -> None:
    # Not through `sys.stdin`, whose lock would be held by this thread when the interpreter ends.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "--no-job":
        del sys.argv[1]
        end_with_parent()
        # It imports compilers, and ends: looking for garbage would take longer than it is worth.
        gc.set_threshold(_OBJECTS_A_COLLECTION)
    else:
        killed_with_parent()
    runpy.run_module(sys.argv.pop(1), run_name="__main__")
