"""llama.cpp's own server with images, from the wheel `xllamacpp`, where llama-server cannot be
compiled:

    pip install xllamacpp==2026.10.11549
    python -m piecework.lab.xllamacpp_server model.gguf mmproj.gguf --threads 2 --port 8000

It imports nothing else of this package, so an environment of its own needs no torch. The wheel is
compiled for AVX2. Kernels of a llama.cpp that was compiled for this CPU, with the same version of
ggml, replace them if they are loaded first:

    g++ -shared -fopenmp -o kernels.so \\
        $(find llama-build/ggml/src/CMakeFiles/ggml-cpu.dir -name '*.o')
    LD_PRELOAD=./kernels.so python -m piecework.lab.xllamacpp_server ...

The server's log names the instructions of the kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.xllamacpp_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("mmproj", help="its vision tower")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a slot")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    # Kernels that were loaded first call functions of the wheel.
    sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_LAZY)
    import xllamacpp

    print(xllamacpp.get_system_info(), flush=True)
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = given.model, given.mmproj
    params.n_parallel, params.n_ctx = given.slots, given.slots * given.context
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = given.threads
    params.hostnames, params.port, params.ui = ["127.0.0.1"], given.port, False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
