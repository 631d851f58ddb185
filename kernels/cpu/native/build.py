"""The C++ kernels, loaded by ctypes: from the package, or compiled once for this machine's CPU by
its own compiler and kept on disk.

They use only C and OpenMP and no torch header, so that a build takes seconds.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ...cache_folder import UnusableFolder, ensure_room, is_held, kernels_folder, locked
from ...toolchain import version_of
from ..machine.cores import choose_threads
from .instruction_sets import instruction_sets
from .openmp import OpenMP, find_openmp, open_to_all

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
_COMPILE_SECONDS = 300  # Limit of CPU time for one file. It does not depend on the machine's load.
# Limit of wall-clock time for one file. A compiler that hangs uses no CPU time.
_BUILD_SECONDS = 900
_BUILD_BYTES = 4 * 2**20  # Upper bound of the disk space of a build.
_HEADER = "weights.h"  # Most files include it, which takes a compiler a second each.
# Upper bound of the disk space of the precompiled header, which exists during a build.
_HEADER_BYTES = 128 * 2**20
# Part of the name of a folder in which a library is built, after the name of its lock.
_MAKING = ".making-"
# The files that take the longest to compile.
_LONGEST = ("integers", "step", "products", "recurrent_prompts")
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class Variant(NamedTuple):
    """One way to compile the kernels, for CPUs that have all of `needs` (Linux's names)."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_HAS_AVX512_VNNI = _HAS_AVX512 | {"avx512_vnni"}

_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
_HAS_AVX512_BF16 = _HAS_AVX512_VNNI | {"avx512_bf16"}

_NEON = frozenset({"asimd"})
_HAS_DOTPROD = _NEON | {"asimdhp", "asimddp"}

_AVX512_FP16 = (*_AVX512_BF16, "-mavx512fp16")
_HAS_AVX512_FP16 = _HAS_AVX512_BF16 | {"avx512_fp16"}

# Best first for each architecture; the architectures' names differ. The last one runs on every CPU
# that the compiler supports.
VARIANTS = (
    Variant(
        "amx",
        _HAS_AVX512_FP16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_AVX512_FP16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Variant("avx512_fp16", _HAS_AVX512_FP16, _AVX512_FP16),
    Variant("avx512_bf16", _HAS_AVX512_BF16, _AVX512_BF16),
    Variant("avx512_vnni", _HAS_AVX512_VNNI, _AVX512_VNNI),
    Variant("avx512", _HAS_AVX512, _AVX512),
    Variant("avx_vnni", _HAS_AVX2 | {"avx_vnni"}, (*_AVX2, "-mavxvnni")),
    Variant("avx2", _HAS_AVX2, _AVX2),
    Variant(
        "neon_bf16",
        _HAS_DOTPROD | {"bf16", "i8mm"},
        ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",),
    ),
    Variant("neon_dotprod", _HAS_DOTPROD, ("-march=armv8.2-a+fp16+dotprod",)),
    Variant("neon", _NEON, ()),
    Variant("portable", frozenset(), ()),
)


def runnable_variants() -> list[Variant]:
    """Return the variants that this CPU can run, best first."""
    able = instruction_sets()
    return [variant for variant in VARIANTS if variant.needs <= able]


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the best kernels for this CPU, built if needed. Log one warning and return None if
    there are none.

    Kernels in the package need no compiler. If kernels cannot be kept on disk, they are built in a
    temporary folder for this process.
    """
    if sys.platform == "win32":
        # Windows compilers do not align the stack for wide vectors.
        logger.warning("no native CPU kernels on Windows, plain torch runs instead (WSL has them)")
        return None
    try:
        return _load_best(kernels_folder())
    except UnusableFolder as error:
        obstacle = (
            f"{error}; set PIECEWORK_KERNELS_DIR to another folder for them, "
            "or PIECEWORK_CACHE_DIR to one for the whole cache"
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "no native CPU kernels, plain torch runs instead (install g++ or clang++, or name one "
            "in $CXX): %s",
            error,
        )
        return None
    try:
        # A loaded library no longer needs its file.
        with tempfile.TemporaryDirectory(
            prefix="piecework-kernels-", ignore_cleanup_errors=True
        ) as folder:
            kernels = _load_best(Path(folder))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "no native CPU kernels, plain torch runs instead (nor in a temporary folder: %s): %s",
            error,
            obstacle,
        )
        return None
    logger.warning("the CPU kernels are built again at each start: %s", obstacle)
    return kernels


def _load_best(folder: Path) -> ctypes.CDLL:
    """Return the best kernels that can be built. Raise `UnusableFolder`, which affects all
    variants, or the error of the best variant.
    """
    best, *others = runnable_variants()
    obstacle: OSError | None = None
    # Skip the variant without vectors, because plain torch has vectors.
    for variant in (best, *(other for other in others if other.needs)):
        try:
            kernels = _load_shipped(variant) or load_variant(variant, folder)
        except UnusableFolder:
            raise
        except OSError as error:
            obstacle = obstacle or error
            continue
        if obstacle:
            logger.warning(
                "the CPU kernels are %s instead of %s: %s", variant.name, best.name, obstacle
            )
        return kernels
    assert obstacle is not None
    raise obstacle


def shipped_library(variant: Variant) -> Path:
    """Return the path in the package of a variant that was compiled from these sources
    (`ship.py`).
    """
    made_from = [variant.name, variant.flags, _FLAGS, _sources()]
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    return _SOURCES / "shipped" / f"{variant.name}-{key[:32]}.so"


def _load_shipped(variant: Variant) -> ctypes.CDLL | None:
    library = shipped_library(variant)
    if not library.exists():
        return None
    try:
        open_to_all()
        return _load(library)
    except OSError as error:
        logger.warning("the CPU kernels that came with the package cannot be loaded: %s", error)
        return None


def load_variant(variant: Variant, folder: Path | None = None) -> ctypes.CDLL:
    """Return one variant, which this CPU must be able to run, from `folder` or the kernels' folder.

    Raise `OSError` if the compiler cannot build it, `UnusableFolder` if the folder is the reason,
    or `subprocess.TimeoutExpired`.
    """
    assert variant.needs <= instruction_sets(), f"this CPU cannot run {variant.name}"
    folder = folder or kernels_folder()
    compiler = find_compiler()
    openmp = find_openmp(compiler)
    made_from = [
        torch.__version__,
        variant.name,
        variant.flags,
        _FLAGS,
        compiler,
        version_of(compiler),
        openmp,
        _sources(),
    ]
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    library = folder / f"{variant.name}-{key[:32]}.so"
    with suppress(OSError):
        return _load(library)
    _remove_abandoned(folder)
    ensure_room(folder, _BUILD_BYTES)
    with locked(library.with_suffix(".lock")):
        with suppress(OSError):
            # Another process built it meanwhile.
            return _load(library)
        compile_variant(compiler, variant, openmp, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise UnusableFolder(f"what was built there cannot be loaded: {error}") from error


def _load(library: Path) -> ctypes.CDLL:
    """Load a library. Raise `OSError` if the file is missing or truncated, which happens if a
    machine crashes during a write. The system's loader would end the process with SIGBUS.
    """
    with library.open("rb") as file:
        head = file.read(64)
    # For 64-bit little-endian ELF files: the section table is at the end. Read its offset, the
    # bytes of an entry and the number of entries. Other formats are checked by the loader.
    if head.startswith(b"\x7fELF\2\1"):
        if len(head) < 64:
            raise OSError(f"{library} is cut short")
        begin, size, rows = struct.unpack("<Q10xHH", head[40:62])
        if library.stat().st_size < begin + size * rows:
            raise OSError(f"{library} is cut short")
    return ctypes.CDLL(str(library))


def _remove_abandoned(folder: Path) -> None:
    """Remove folders of builds that were killed. Their locks are free."""
    for left in folder.glob(f"*{_MAKING}*"):
        if not is_held(folder / f"{left.name.partition(_MAKING)[0]}.lock"):
            shutil.rmtree(left, ignore_errors=True)


def compile_variant(compiler: str, variant: Variant, openmp: OpenMP, library: Path) -> None:
    """Compile a variant into `library`. Raise `OSError` if the compiler fails, `UnusableFolder` if
    the folder is the reason, or `subprocess.TimeoutExpired`.
    """
    with (
        tempfile.TemporaryDirectory(
            prefix=f"{library.stem}{_MAKING}", dir=library.parent
        ) as folder,
        ThreadPoolExecutor(choose_threads().number) as pool,
    ):
        # Keep the compiler's temporary files in the same folder, whose free space was checked.
        environment = os.environ | {"TMPDIR": folder, "LC_ALL": "C"}
        _check_flags(compiler, variant, environment)
        print(f"building the CPU kernels ({variant.name})", file=sys.stderr, flush=True)
        flags = [*_FLAGS, *variant.flags, *openmp.compile]
        sources = sorted(_SOURCES.glob("*.cpp"), key=_place)
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        header = pool.submit(_precompiled, compiler, flags, environment)

        def make(number: int) -> None:
            # The first file takes longest, so it does not wait for the header.
            included = header.result() if number else []
            source, made = str(sources[number]), objects[number]
            _run([compiler, *flags, *included, "-c", source, "-o", made], environment)

        list(pool.map(make, range(len(sources))))
        unfinished = f"{folder}/{library.name}"
        linked = ["-shared", *objects, *openmp.link, "-o", unfinished]
        _run([compiler, *_FLAGS, *variant.flags, *linked], environment)
        os.replace(unfinished, library)


def _check_flags(compiler: str, variant: Variant, environment: dict[str, str]) -> None:
    """Raise `OSError` if the compiler lacks a flag, as older compilers do for newer CPUs. Compiles
    nothing.
    """
    _run([compiler, *variant.flags, "-fsyntax-only", "-x", "c++", os.devnull], environment)


def _place(source: Path) -> tuple[int, int]:
    """Sort key that puts long files first, so that no thread compiles a long file at the end."""
    is_long = source.stem in _LONGEST
    return (_LONGEST.index(source.stem) if is_long else len(_LONGEST)), -source.stat().st_size


def _precompiled(compiler: str, flags: list[str], environment: dict[str, str]) -> list[str]:
    """Return the flags that include the precompiled header, or none if it cannot be built."""
    header = Path(environment["TMPDIR"]) / "kernels.h"
    # ccache does not cache objects that use a precompiled header.
    is_cached = Path(compiler).resolve().name == "ccache"
    if is_cached or shutil.disk_usage(header.parent).free < _HEADER_BYTES:
        return []
    header.write_text(f'#include "{_SOURCES / _HEADER}"\n')
    made = header.with_name("kernels.h.gch")
    try:
        _run([compiler, *flags, "-x", "c++-header", str(header), "-o", str(made)], environment)
    except (OSError, subprocess.SubprocessError):
        made.unlink(missing_ok=True)
        return []
    return ["-include", str(header)]


def _run(command: list[str], environment: dict[str, str]) -> None:
    # The limit also applies to child processes of the compiler, which would go on compiling if only
    # the compiler were killed. A shell sets it, because code between fork and exec may deadlock in
    # a process with threads.
    limit = f'ulimit -t {_COMPILE_SECONDS} 2> /dev/null || :; exec "$@"'
    began = time.monotonic()
    result = subprocess.run(
        ["sh", "-c", limit, "sh", *command],
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        env=environment,
    )
    if result.returncode == 0:
        return
    if time.monotonic() - began >= _COMPILE_SECONDS:
        raise subprocess.TimeoutExpired(command, _COMPILE_SECONDS)
    if full := next((reason for reason in _FULL if reason in result.stderr), None):
        raise UnusableFolder(f"{environment['TMPDIR']}: {full}")
    raise OSError(f"{command[0]} failed: {result.stderr.strip().partition(chr(10))[0]}")


def find_compiler() -> str:
    """Return the compiler's path. Raise `OSError` if there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path
    raise OSError("this machine has no C++ compiler")


def _sources() -> list[tuple[str, str]]:
    return sorted(
        (str(path.relative_to(_SOURCES)), path.read_text())
        for path in _SOURCES.rglob("*")
        if path.suffix in (".cpp", ".h")
    )
