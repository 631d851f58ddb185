"""Choose the OpenMP library of the kernels' threads: torch's own if possible. With two libraries,
each would keep threads that wait for work on all cores.
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
    """Flags of the compiler and of the linker. On macOS, whose clang has no OpenMP, torch's folder
    contains a header and a library.
    """

    compile: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


def find_openmp(compiler: str) -> OpenMP:
    """Return the flags for the compiler at this path. If it has no OpenMP, log a warning and return
    no flags; kernels then use one thread.
    """
    if is_clang(compiler):
        # Do not link g++'s library: it would tell each of clang's threads that it is alone.
        return _tried(compiler, OpenMP(("-fopenmp",), ("-fopenmp",)))
    # g++ has OpenMP.
    return OpenMP(("-fopenmp",), (_loaded_library() or "-fopenmp",))


def open_to_all() -> None:
    """Let libraries that are not linked to OpenMP find torch's, or g++'s if torch has none. Raise
    `OSError` if this machine has neither.
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
    """Return the path of the libgomp that torch loaded, or None."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    return next((path for line in lines if "/libgomp" in (path := line.rpartition(" ")[2])), None)
