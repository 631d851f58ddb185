"""The process that tries kernels, over stand-ins for the libraries, with a fault: `python
trial_standin.py FAULT FD DEVICE`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import flashinfer_standin
import library_ops_standin
from flashinfer_standin import store

from piecework.kernels.cuda import attention, libraries, trials

poisoned = False


def kernel(work: Any, fault: str) -> Any:
    """A kernel of a library in which the fault happens: an illegal access is the fate of every
    later one, too.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        global poisoned
        match fault:
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "poisoned":
                poisoned = True
            case "hangs":
                time.sleep(600)
            case "builds":
                subprocess.run(
                    [sys.executable, "-c", "import time; time.sleep(1)", "batch_prefill.cu"],
                    check=True,
                )
        if poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return work(*args, **kwargs)

    return run


def load(name: str) -> libraries.LibraryOps:
    if fault == "import ends it":
        os._exit(66)
    library = getattr(library_ops_standin, name.replace("-", "_"))()
    if name == "sgl-kernel":
        library.module.rmsnorm = kernel(library.module.rmsnorm, fault)
    elif poisoned:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return library


if __name__ == "__main__":
    fault = sys.argv[1]
    libraries.load = load  # type: ignore[assignment]
    attention._library = lambda: flashinfer_standin
    attention._WORKSPACE_BYTES = 1024
    trials.store_of_keys_and_values = lambda: store
    if fault == "attention segfaults":
        attention._Call.run = kernel(None, "segfault")  # type: ignore[method-assign]
    sys.exit(trials.main(sys.argv[2:]))
