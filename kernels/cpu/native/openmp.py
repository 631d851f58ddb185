"""Which OpenMP the kernels' threads are of: torch's own where it may be, for two of them would each
keep threads that wait for work on all cores.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ...toolchain import is_clang

logger = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_TORCH = Path(torch.__file__).parent
_TRIAL = "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"
_TRIAL_SECONDS = 60


class OpenMP(NamedTuple):
    """Flags of the compiler and of the linker. `_TORCH` has both where torch brings a compiler's
    header, as on macOS, whose own clang has neither header nor library.
    """

    compile: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


def find_openmp(compiler: str) -> OpenMP:
    """For a compiler, at its path. Without flags, and with a warning, where it has none: then
    kernels compute with one thread.
    """
    if is_clang(compiler):
        # Not linked to g++'s library: that would tell each thread of clang's that it is alone.
        return _tried(compiler, OpenMP(("-fopenmp",), ("-fopenmp",)))
    # g++ brings its own.
    return OpenMP(("-fopenmp",), (_loaded_library() or "-fopenmp",))


def open_to_all() -> None:
    """Let libraries that are linked to no OpenMP find torch's, or g++'s where torch brought none.
    Raises `OSError` where this machine has neither.
    """
    ctypes.CDLL(_loaded_library() or "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@cache
def _tried(compiler: str, usual: OpenMP) -> OpenMP:
    library = _TORCH / "lib" / "libomp.dylib"
    torchs = OpenMP(
        ("-Xclang", "-fopenmp", "-idirafter", str(_TORCH / "include")),
        (str(library), f"-Wl,-rpath,{library.parent}"),
    )
    for each in (torchs, usual) if library.exists() else (usual,):
        if _works(compiler, each):
            return each
    logger.warning(
        "the CPU kernels compute with one thread: %s has no OpenMP; install it (libomp-dev on "
        "Debian and Ubuntu, libomp by Homebrew), or name g++ in $CXX",
        compiler,
    )
    return OpenMP()


def _works(compiler: str, openmp: OpenMP) -> bool:
    with tempfile.TemporaryDirectory(prefix="piecework-openmp-") as folder:
        source = Path(folder) / "trial.cpp"
        source.write_text(_TRIAL)
        command = [compiler, *openmp.compile, "-fPIC", "-shared", str(source), *openmp.link]
        try:
            return not subprocess.run(
                [*command, "-o", f"{folder}/trial.so"], capture_output=True, timeout=_TRIAL_SECONDS
            ).returncode
        except (OSError, subprocess.SubprocessError):
            return False


def _loaded_library() -> str | None:
    """The libgomp that torch brought: linked by its own path, it is found among what is loaded."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    return next((path for line in lines if "/libgomp" in (path := line.rpartition(" ")[2])), None)
