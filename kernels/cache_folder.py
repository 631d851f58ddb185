"""The folder of everything that is built once on a machine and kept: compiled pieces and native
kernels.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no fcntl.
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """Return $PIECEWORK_CACHE_DIR, or `piecework` in the user's cache folder."""
    if chosen := os.environ.get("PIECEWORK_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "piecework"


def kernels_folder() -> Path:
    """Return the folder of the native kernels: $PIECEWORK_KERNELS_DIR, or `native` in the cache.
    These kernels belong to the machine, not to a model.
    """
    if chosen := os.environ.get("PIECEWORK_KERNELS_DIR"):
        return Path(chosen).expanduser()
    return cache_folder() / "native"


def verdicts_folder() -> Path:
    """Return the folder that keeps the results of trials of libraries' kernels on this machine."""
    return cache_folder() / "libraries"


class UnusableFolder(OSError):
    """A folder cannot be created or written, or its disk or quota is full."""


def ensure_room(folder: Path, num_bytes: int) -> None:
    """Create `folder` if needed, and check that `num_bytes` bytes can be written in it. Raise
    `UnusableFolder` if not.
    """
    try:
        # Code in this folder is executed, so other users must not be able to write it.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as probe:
            # Write the bytes instead of reading the free space: quotas do not show in the free
            # space, and network file systems report it late.
            probe.write(bytes(num_bytes))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UnusableFolder(f"{folder}: {error.strerror or error}") from error


def check_trusted(path: Path) -> None:
    """Raise `UnusableFolder` if another user could have written a folder or file, because its code
    is executed. The superuser is trusted.
    """
    if not hasattr(os, "geteuid"):
        return
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise UnusableFolder(
            f"{path} belongs to another user (number {status.st_uid}), whose code is not run"
        )
    # In a sticky folder, other users cannot replace a file.
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UnusableFolder(f"{path} can be written by every user: chmod o-w {path}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time can hold, while the block runs. It is released when
    its process dies.

    If the system or file system has no locks, two processes may build the same file, and the later
    one replaces the earlier one. Raise `OSError` if the lock file cannot be created.
    """
    with open(path, "w") as file:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds this lock. Also true if that cannot be determined."""
    if fcntl is None:
        return True
    try:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def hold_lock(path: Path) -> IO[str]:
    """Hold a lock until the returned file is closed. Raise `BlockingIOError` if another process
    holds it, and `OSError` if the file cannot be created.
    """
    file = open(path, "w")  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            pass  # The file system has no locks.
    return file
