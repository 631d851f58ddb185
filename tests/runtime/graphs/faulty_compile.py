"""The process that compiles a model's pieces, with a fault: `python faulty_compile.py FAULT
JOB`.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from piecework.compilation import piece_maker
from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.core.errors import CompileError, TraceError
from piecework.compilation.piece_store import PieceStore
from piecework.kernels.cache_folder import cache_folder
from piecework.runtime.graphs import compile_pieces

compile_piece, attempts = EagerCompiler.compile, [0]


def fail(*numbers: int, error: Exception | None = None) -> None:
    """Attempts to compile that fail."""

    def compile(self: EagerCompiler, *args: Any) -> None:
        attempts[0] += 1
        if attempts[0] in numbers:
            raise error or CompileError("an op without a lowering")
        compile_piece(self, *args)

    EagerCompiler.compile = compile  # type: ignore[method-assign]


def killed(self: EagerCompiler, *args: Any) -> None:
    attempts[0] += 1
    if attempts[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    compile_piece(self, *args)


def damaged() -> int:
    code = compile_pieces.main(sys.argv[2:])
    for file in cache_folder().glob("*.graph"):
        file.write_bytes(b"no graph")
    return code


def seed(fault: str) -> None:
    match fault:
        case "one piece":
            # The second attempt leaves the piece as it was traced in the cache.
            fail(2)
        case "all pieces":
            fail(1, 3, 5)
        case "killed":
            EagerCompiler.compile = killed  # type: ignore[method-assign]
        case "no memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))
        case "untraceable":

            def no_trace(*_: Any) -> Any:
                raise TraceError("no way")

            piece_maker.trace = no_trace
        case "full disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12))
        case "disk full in the end":

            def no_space(*_: Any) -> Path:
                raise OSError(28, "No space left on device")

            CompileCache.put = no_space  # type: ignore[method-assign]
        case "other keys":
            PieceStore.versions = lambda self: {"piecework": "another"}  # type: ignore[method-assign]


if __name__ == "__main__":
    seed(sys.argv[1])
    sys.exit(damaged() if sys.argv[1] == "damaged" else compile_pieces.main(sys.argv[2:]))
