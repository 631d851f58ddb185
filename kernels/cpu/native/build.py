"""The C++ kernels: compiled once for this machine's CPU with its own compiler, kept on disk, loaded by ctypes.

They know C and OpenMP alone, no torch header, so that a build takes a second or two. OpenMP's library is the one that
torch has loaded, where it can be found: two of them would each keep threads that wait for work on all cores.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ...cache_folder import kernels_folder

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
_BUILD_SECONDS = 120


class Variant(NamedTuple):
    """One way to compile the kernels: for CPUs that have all of `needs`, under Linux's names."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_HAS_AVX512_BF16 = _HAS_AVX512 | {"avx512_bf16"}

VARIANTS = (
    Variant("avx512_fp16", _HAS_AVX512_BF16 | {"avx512_fp16"}, (*_AVX512_BF16, "-mavx512fp16")),
    Variant("avx512_bf16", _HAS_AVX512_BF16, _AVX512_BF16),
    Variant("avx512", _HAS_AVX512, _AVX512),
    Variant("avx2", _HAS_AVX2, _AVX2),
    Variant("portable", frozenset(), ()),
)
"""The best first; the last runs on every CPU that the compiler is for."""


def instruction_sets() -> frozenset[str]:
    """What this CPU can do, as Linux lists it; nothing where that is not to be found out."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), []))


def runnable_variants() -> list[Variant]:
    """Those that this CPU can run, the best first."""
    able = instruction_sets()
    return [variant for variant in VARIANTS if variant.needs <= able]


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The best for this CPU that its compiler can make, built if they are not there yet; None, with one warning, where none can be."""
    best, *others = runnable_variants()
    obstacle: Exception | None = None
    # One for every CPU is no substitute for vectors, which plain torch has.
    for variant in (best, *(other for other in others if other.needs)):
        try:
            kernels = load_variant(variant)
        except (OSError, subprocess.SubprocessError) as error:
            obstacle = obstacle or error
            continue
        if obstacle:
            logger.warning("the CPU kernels are %s instead of %s: %s", variant.name, best.name, obstacle)
        return kernels
    logger.warning("no native CPU kernels, plain torch runs instead (install g++ or clang++, or name one in $CXX): %s", obstacle)
    return None


def load_variant(variant: Variant) -> ctypes.CDLL:
    """One variant, which this CPU must be able to run. Raises `OSError` or `subprocess.SubprocessError` where it cannot be built."""
    assert variant.needs <= instruction_sets(), f"this CPU cannot run {variant.name}"
    compiler = _compiler()
    openmp = _loaded_openmp()
    made_from = [torch.__version__, variant.name, variant.flags, _FLAGS, compiler, openmp, _sources()]
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    folder = kernels_folder()
    # What is loaded from here is run: nobody else may write it.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"{variant.name}-{key[:32]}.so"
    if not library.exists():
        with open(folder / f"{library.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(compiler, variant, openmp, library)
    return ctypes.CDLL(str(library))


def _build(compiler: str, variant: Variant, openmp: str | None, library: Path) -> None:
    # Older compilers do not know all flags.
    _run([compiler, *variant.flags, "-fsyntax-only", "-x", "c++", os.devnull])
    print(f"building the CPU kernels ({variant.name}), once for this machine", file=sys.stderr, flush=True)
    flags = [*_FLAGS, *variant.flags]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [[compiler, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        unfinished = f"{folder}/{library.name}"
        _run([compiler, *flags, "-shared", *objects, *([openmp] if openmp else []), "-o", unfinished])
        os.replace(unfinished, library)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if result.returncode != 0:
        raise OSError(f"{command[0]} failed: {result.stderr.strip().partition(chr(10))[0]}")


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path
    raise OSError("this machine has no C++ compiler")


def _loaded_openmp() -> str | None:
    """The libgomp that torch brought: linked by its own path, it is found among what is loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((path for line in lines if "/libgomp" in (path := line.rpartition(" ")[2])), None)


def _sources() -> list[tuple[str, str]]:
    return sorted((path.name, path.read_text()) for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
