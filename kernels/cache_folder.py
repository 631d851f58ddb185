"""Where everything lies that is made once on a machine and kept: compiled pieces and native
kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """Where the cache lies: $PIECEWORK_CACHE_DIR, or `piecework` in the user's cache folder."""
    if chosen := os.environ.get("PIECEWORK_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "piecework"


def kernels_folder() -> Path:
    """Where the native kernels lie, which belong to the machine and not to a model:
    $PIECEWORK_KERNELS_DIR, or in the cache.
    """
    if chosen := os.environ.get("PIECEWORK_KERNELS_DIR"):
        return Path(chosen).expanduser()
    return cache_folder() / "native"


def verdicts_folder() -> Path:
    """Where it is kept what trials of libraries' kernels have shown on this machine."""
    return cache_folder() / "libraries"


class UnusableFolder(OSError):
    """Nothing can be kept in a folder, or not as much as is needed: it cannot be made or written,
    or its disk or quota is full.
    """


def ensure_room(folder: Path, num_bytes: int) -> None:
    """Make `folder` if it is not there, and see that so many bytes can be written in it. Raises
    `UnusableFolder`.
    """
    try:
        # What is loaded from here is run: nobody else may write it.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as probe:
            # Written out, and not only asked for: quotas show in no figure of a disk's free space,
            # and over a network late.
            probe.write(bytes(num_bytes))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UnusableFolder(f"{folder}: {error.strerror or error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process at a time, as long as the block runs: whoever waited finds made what the
    other made. A dead process lets go.

    Where the system or the file system has no locks two processes may make the same, and the later
    one's takes the place of the other's. Raises `OSError` where the file cannot be made.
    """
    with open(path, "w") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds this lock; also where that cannot be found out."""
    if fcntl is None:
        return True
    try:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def hold_lock(path: Path) -> IO[str]:
    """Held by this process until the file that is returned is closed. Raises `BlockingIOError`
    where another one holds it, and `OSError` where the file cannot be made.
    """
    file = open(path, "w")  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            pass  # a file system without locks
    return file
