"""Compiles parts of the C++ kernels with the machine's own compiler.

The kernels use only C and OpenMP and no torch header, so that a file takes seconds.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from ...build_progress import Progress
from ...cache_folder import UnusableFolder
from ..machine.cores import choose_threads
from . import parts
from .openmp import OpenMP
from .variants import Variant

FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
# Part of the name of a folder in which libraries are built, after the name of their lock.
MAKING = ".making-"
BUILD_BYTES = 4 * 2**20  # Upper bound of the disk space of a build.
_COMPILE_SECONDS = 300  # Limit of CPU time for one file. It does not depend on the machine's load.
# Limit of wall-clock time for one file. A compiler that hangs uses no CPU time.
_BUILD_SECONDS = 900
_HEADER = "weights.h"  # Most files include it, which takes a compiler a second each.
# Upper bound of the disk space of the precompiled header, which exists during a build.
_HEADER_BYTES = 128 * 2**20
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))

niceness = 0  # Added to the niceness of compilers.


def find_compiler() -> str:
    """Return the compiler's path. Raise `OSError` if there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path
    raise OSError("this machine has no C++ compiler")


def compile_libraries(
    compiler: str,
    variant: Variant,
    openmp: OpenMP,
    libraries: Mapping[Path, tuple[parts.Source, ...]],
    lock: str,
) -> None:
    """Compile the sources of each library and link them, in parallel.

    `lock` is the name of the lock that the caller holds in the libraries' folder. Raise `OSError`
    if the compiler fails, `UnusableFolder` if the folder is the reason, or
    `subprocess.TimeoutExpired`.
    """
    place = next(iter(libraries)).parent
    # Libraries may have files in common.
    sources = sorted(set(chain.from_iterable(libraries.values())), key=lambda each: each.place)
    with (
        tempfile.TemporaryDirectory(prefix=f"{lock}{MAKING}", dir=place) as folder,
        ThreadPoolExecutor(choose_threads().number) as pool,
        Progress(f"CPU kernels ({variant.name})", len(sources)) as progress,
    ):
        # Keep the compiler's temporary files in the same folder, whose free space was checked.
        environment = os.environ | {"TMPDIR": folder, "LC_ALL": "C"}
        check_flags(compiler, variant, environment)
        flags = [*FLAGS, *variant.flags, *openmp.compile]
        if len(sources) > 1:
            header = pool.submit(_precompiled, compiler, flags, environment)

        def compile_one(source: parts.Source) -> str:
            # The first file takes longest, so it does not wait for the header.
            included = [] if source is sources[0] else header.result()
            made = f"{folder}/{source.name}.o"
            file = [*source.flags, "-c", str(source.path), "-o", made]
            _run([compiler, *flags, *included, *file], environment)
            progress.advance(source.name)
            return made

        objects = {source: pool.submit(compile_one, source) for source in sources}
        try:
            for library, own in libraries.items():
                unfinished = f"{folder}/{library.name}"
                linked = ["-shared", *(objects[each].result() for each in own), *openmp.link]
                _run([compiler, *FLAGS, *variant.flags, *linked, "-o", unfinished], environment)
                os.replace(unfinished, library)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def check_flags(compiler: str, variant: Variant, environment: dict[str, str]) -> None:
    """Raise `OSError` if the compiler lacks a flag, as older compilers do for newer CPUs. Compiles
    nothing.
    """
    _run([compiler, *variant.flags, "-fsyntax-only", "-x", "c++", os.devnull], environment)


def has_flags(variant: Variant) -> bool:
    """Return whether the compiler has the variant's flags. Raise `OSError` without a compiler."""
    compiler = find_compiler()
    try:
        check_flags(compiler, variant, os.environ | {"TMPDIR": tempfile.gettempdir()})
    except OSError:
        return False
    return True


def _precompiled(compiler: str, flags: list[str], environment: dict[str, str]) -> list[str]:
    """Return the flags that include the precompiled header, or none if it cannot be built."""
    header = Path(environment["TMPDIR"]) / "kernels.h"
    # ccache does not cache objects that use a precompiled header.
    is_cached = Path(compiler).resolve().name == "ccache"
    if is_cached or shutil.disk_usage(header.parent).free < _HEADER_BYTES:
        return []
    header.write_text(f'#include "{parts.SOURCES / _HEADER}"\n')
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
    nicely = f"nice -n {niceness} " if niceness else ""
    limit = f'ulimit -t {_COMPILE_SECONDS} 2> /dev/null || :; exec {nicely}"$@"'
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
