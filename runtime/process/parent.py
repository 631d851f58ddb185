"""Ends a process when its parent ends, for whatever reason.

Its standard input is a pipe that the parent holds open. The first line of it is the job.

`python -m piecework.runtime.process.parent MODULE ...` runs MODULE as such a program, and the
kernel kills it with the thread that started it, even while it imports. With `--no-job` before
MODULE, there is no job, and the thread that starts the program may end before it.
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
_COLLECTION_THRESHOLD = 50_000  # New objects per garbage collection. Python's default is 700.
# Read when torch is loaded, unless the user has set them. By default, libgomp's threads spin for
# milliseconds before they sleep, and other threads wait for their cores. torch's profiler prints
# lines beside the log.
ENVIRONMENT = {"GOMP_SPINCOUNT": "2000", "KINETO_LOG_LEVEL": "99"}

# Set by the server for each engine process (`executor.first_start`), unless the user has set it.
KERNELS = "PIECEWORK_KERNELS"


def read_line() -> bytes:
    """Return the first line of the standard input. If the input ends before, exit with code 1."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 2**16)
        if not part:
            os._exit(1)
        line += part
    return line


def end_with_parent() -> None:
    """End this process when its standard input closes. The job must have been read before."""
    threading.Thread(target=_watch, name="parent", daemon=True).start()


def killed_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even if
    this process is stopped. See prctl(2).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch() -> None:
    # Not `sys.stdin`: this thread would hold its lock when the interpreter ends.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "--no-job":
        del sys.argv[1]
        end_with_parent()
        # The program imports compilers, then ends: collecting garbage would cost more than it
        # saves.
        gc.set_threshold(_COLLECTION_THRESHOLD)
    else:
        killed_with_parent()
    runpy.run_module(sys.argv.pop(1), run_name="__main__")
