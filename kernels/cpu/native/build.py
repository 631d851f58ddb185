"""The C++ kernels, loaded by ctypes: from the package, or compiled once for this machine's CPU by
its own compiler and kept on disk.

    kernels = load_kernels()  # None if this machine has none.
    kernels.piecework_linear(...)
    kernels.part(RECURRENT).piecework_conv_step(...)
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ...cache_folder import (
    UnusableFolder,
    check_trusted,
    ensure_room,
    is_held,
    kernels_folder,
    locked,
)
from ...toolchain import version_of
from . import parts
from .compiler import BUILD_BYTES, FLAGS, MAKING, compile_libraries, find_compiler, has_flags
from .instruction_sets import instruction_sets
from .openmp import find_openmp, open_to_all
from .parts import CORE, all_sources, sources_of
from .variants import VARIANTS as VARIANTS
from .variants import Variant as Variant
from .variants import runnable_variants

logger = logging.getLogger(__name__)

_prepared: list[str] = []  # Parts that are compiled together with the core.
_is_left_out = False  # Whether `load_kernels` returns None in this process.


class Kernels(ctypes.CDLL):
    """The core of one variant of the kernels, and the parts that were asked for.

    Parts that are neither in the package nor in `folder` are compiled into `folder`, or into a
    temporary folder if it is None.
    """

    def __init__(self, core: Path, variant: Variant, folder: Path | None) -> None:
        super().__init__(str(core))
        self._variant, self._folder = variant, folder
        self._parts: dict[str, ctypes.CDLL] = {CORE: self}

    def part(self, name: str) -> ctypes.CDLL:
        """Return a part. Raise `OSError` or `subprocess.SubprocessError` if it cannot be built."""
        self.need(name)
        return self._parts[name]

    def need(self, *names: str) -> None:
        """Load parts. Those that must be compiled are compiled together."""
        if missing := [name for name in names if name not in self._parts]:
            with _place(self._folder) as folder:
                for name, path in _provide(self._variant, missing, folder).items():
                    self._parts[name] = part = ctypes.CDLL(str(path))
                    if (table := getattr(part, f"piecework_format_{name}", None)) is not None:
                        table.restype = ctypes.c_void_p
                        self.piecework_add_format(ctypes.c_void_p(table()))
                    elif name in parts.CACHES:
                        self.piecework_caches.restype = ctypes.c_void_p
                        part[f"piecework_cache_{name}"](ctypes.c_void_p(self.piecework_caches()))


def prepare_kernels(names: Callable[[], Iterable[str]]) -> None:
    """If the kernels must be compiled, compile them now together with some parts.

    Other parts are compiled one after another when they are asked for. `names` may return names
    that are no parts.
    """
    is_loaded = load_kernels.cache_info().currsize > 0
    if not is_loaded and _are_missing():
        _prepared.extend(set(names()).intersection(parts.all_parts()) - {CORE})
        load_kernels()


def leave_out_missing() -> bool:
    """Make `load_kernels` return None in this process if the kernels must be compiled first.

    Return whether that is so. Call it before `load_kernels`.
    """
    global _is_left_out
    _is_left_out = _are_missing()
    return _is_left_out


def _are_missing() -> bool:
    """Return whether kernels for this CPU must be compiled, and can be."""
    if sys.platform == "win32":
        return False
    try:
        for variant in runnable_variants():
            paths = shipped_library(variant), _kept_library(variant, kernels_folder())
            if any(path.exists() for path in paths):
                return False
            if variant.needs and has_flags(variant):
                return True
    except OSError:  # There is no compiler.
        return False
    return False


@cache
def load_kernels() -> Kernels | None:
    """Return the best kernels for this CPU, built if needed. Log one warning and return None if
    there are none.

    Kernels in the package need no compiler. If kernels cannot be kept on disk, they are built in a
    temporary folder for this process.
    """
    if _is_left_out:
        return None
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
        kernels = _load_best(None)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "no native CPU kernels, plain torch runs instead (nor in a temporary folder: %s): %s",
            error,
            obstacle,
        )
        return None
    logger.warning("the CPU kernels are built again at each start: %s", obstacle)
    return kernels


@cache
def load_part(name: str) -> ctypes.CDLL | None:
    """Return a part of the best kernels. Log one warning and return None if there is none."""
    if (kernels := load_kernels()) is None:
        return None
    try:
        return kernels.part(name)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels lack %s, plain torch runs instead: %s", name, error)
        return None


def _load_best(folder: Path | None) -> Kernels:
    """Return the best kernels that can be built. Raise `UnusableFolder`, which affects all
    variants, or the error of the best variant.
    """
    best, *others = runnable_variants()
    obstacle: OSError | None = None
    # Skip the variant without vectors, because plain torch has vectors.
    for variant in (best, *(other for other in others if other.needs)):
        try:
            kernels = _open(variant, folder, _prepared)
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


def load_variant(variant: Variant, folder: Path | None = None) -> Kernels:
    """Return one variant, which this CPU must be able to run, from `folder` or the kernels' folder.

    Raise `OSError` if the compiler cannot build it, `UnusableFolder` if the folder is the reason,
    or `subprocess.TimeoutExpired`.
    """
    return _open(variant, folder or kernels_folder(), ())


def _open(variant: Variant, folder: Path | None, names: Sequence[str]) -> Kernels:
    assert variant.needs <= instruction_sets(), f"this CPU cannot run {variant.name}"
    with _place(folder) as place:
        paths = _provide(variant, [CORE, *names], place)
        kernels = Kernels(paths[CORE], variant, folder)
        kernels.need(*names)
    return kernels


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """Give a folder for libraries. A loaded library no longer needs its file."""
    if folder is not None:
        yield folder
        return
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="piecework-kernels-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UnusableFolder(str(error)) from error
    with temporary as name:
        yield Path(name)


def shipped_library(variant: Variant, part: str = CORE) -> Path:
    """Return the path in the package of a part that was compiled from these sources (`ship.py`)."""
    files = [source.flags for source in sources_of(part)]
    made_from = [variant.name, variant.flags, FLAGS, part, files, all_sources()]
    return parts.SOURCES / parts.SHIPPED / f"{_name(variant, part, made_from)}.so"


def _kept_library(variant: Variant, folder: Path, part: str = CORE) -> Path:
    """Return the path of a part that this machine's compiler makes. Raise `OSError` if there is
    none.
    """
    compiler = find_compiler()
    made_from = [
        torch.__version__,
        variant.name,
        variant.flags,
        FLAGS,
        compiler,
        version_of(compiler),
        find_openmp(compiler),
        part,
        [source.flags for source in sources_of(part)],
        all_sources(),
    ]
    return folder / f"{_name(variant, part, made_from)}.so"


def _name(variant: Variant, part: str, made_from: Sequence[object]) -> str:
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    return f"{variant.name}-{part}-{key[:32]}"


def _provide(variant: Variant, names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Return the paths of libraries that can be loaded. Those that are missing are compiled into
    `folder`.
    """
    found = {part: path for part in names if (path := _shipped(variant, part)) is not None}
    if len(found) == len(names):
        return found
    kept = {part: _kept_library(variant, folder, part) for part in names if part not in found}
    if folder.exists():
        check_trusted(folder)
    missing = [part for part, path in kept.items() if not _is_whole(path)]
    if missing:
        _remove_abandoned(folder)
        ensure_room(folder, BUILD_BYTES)
        lock = kept[missing[0]].with_suffix(".lock")
        with locked(lock):
            # Another process may have built them meanwhile.
            missing = [part for part in missing if not _is_whole(kept[part])]
            if missing:
                compiler = find_compiler()
                sources = {kept[part]: sources_of(part) for part in missing}
                compile_libraries(compiler, variant, find_openmp(compiler), sources, lock.stem)
    for path in kept.values():
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise UnusableFolder(f"what was built there cannot be loaded: {error}") from error
    return found | kept


def _shipped(variant: Variant, part: str) -> Path | None:
    library = shipped_library(variant, part)
    if not library.exists():
        return None
    try:
        open_to_all()
        _load(library)
    except OSError as error:
        logger.warning("the CPU kernels that came with the package cannot be loaded: %s", error)
        return None
    return library


def _is_whole(library: Path) -> bool:
    """Return whether a kept library can be loaded. Raise `UnusableFolder` if another user wrote
    it.
    """
    if library.exists():
        check_trusted(library)
    try:
        _load(library)
    except OSError:
        return False
    return True


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
    for left in folder.glob(f"*{MAKING}*"):
        if not is_held(folder / f"{left.name.partition(MAKING)[0]}.lock"):
            shutil.rmtree(left, ignore_errors=True)
