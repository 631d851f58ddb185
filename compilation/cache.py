"""The compile cache on disk, shared by all servers of a machine.

    <folder>/<key>.json           an entry: its description and the hash of its content
    <folder>/<hash><suffix>       the content, named by its own hash, so it never changes
    <folder>/<key>.lock           held by the process that makes the entry

A key is the hash of everything that the entry depends on. Files are written under a temporary name
and renamed, the content first. An entry whose content is missing or has another hash is ignored.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.cache_folder import UnusableFolder, cache_folder, ensure_room, locked

_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_CONTENT = re.compile(r"[0-9a-f]{64}\.[a-z0-9]+")
_WORK = "work-"
_PROBE_BYTES = 2**20  # The disk must have this room. Most pieces are smaller.


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of the cache. `about` describes it; `created` is in seconds since 1970."""

    key: str
    content: str
    num_bytes: int
    created: float
    about: dict[str, Any]


def inductor_folder() -> Path:
    """Return the folder of Inductor's cache, for models that are run by `torch.compile`."""
    return cache_folder() / "inductor"


def entry_key(parts: Mapping[str, Any]) -> str:
    """Return the key of an entry that depends on `parts`: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class CompileCache:
    """Files by key.

    Raises `OSError` if the folder cannot be written. Damaged entries read as None.
    """

    def __init__(self, folder: Path) -> None:
        try:
            # Code is loaded from here: other users must not write to it.
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _with_remedy(f"{folder}: {error.strerror}") from None
        self.folder = folder

    def find(self, key: str) -> Entry | None:
        """Return the entry of a key, or None if it is missing or damaged."""
        try:
            data = json.loads((self.folder / f"{key}.json").read_text())
            entry = Entry(key=key, **data)
            described = (
                isinstance(entry.created, int | float)
                and isinstance(entry.num_bytes, int)
                and isinstance(entry.about, dict)
                and isinstance(entry.content, str)
                and _CONTENT.fullmatch(entry.content)
            )
            if described and _hash(self.folder / entry.content) == entry.content.partition(".")[0]:
                return entry
        except (OSError, ValueError, TypeError, RecursionError):
            pass
        return None

    def get(self, key: str) -> Path | None:
        """Return the path of an entry's content, or None if the entry is missing or damaged."""
        entry = self.find(key)
        return None if entry is None else self.folder / entry.content

    def put(self, key: str, file: Path, about: Mapping[str, Any]) -> Path:
        """Store `file`, which lies in a `work_folder`, as the content of an entry.

        Replace an older entry of the key.
        """
        content = f"{_hash(file)}{file.suffix}"
        num_bytes = file.stat().st_size
        os.replace(file, self.folder / content)
        entry = {
            "content": content,
            "num_bytes": num_bytes,
            "created": time.time(),
            "about": dict(about),
        }
        with self.work_folder() as folder:
            (folder / "entry").write_text(json.dumps(entry))
            os.replace(folder / "entry", self.folder / f"{key}.json")
        return self.folder / content

    def check_writable(self) -> None:
        """Raise `UnusableFolder` if entries cannot be stored. Called before a long compilation."""
        try:
            ensure_room(self.folder, _PROBE_BYTES)
        except UnusableFolder as error:
            raise _with_remedy(error) from None

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """Make a folder on the cache's disk for unfinished files. It is removed after the block."""
        folder = tempfile.mkdtemp(prefix=_WORK, dir=self.folder)
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Return a lock that one process at a time holds. The kernel releases it if the process
        dies.

        A process that has waited for it finds the entry finished.
        """
        return locked(self.folder / f"{key}.lock")

    def entries(self) -> list[Entry]:
        """Return all undamaged entries, newest first."""
        keys = [path.stem for path in self.folder.glob("*.json") if _ENTRY.fullmatch(path.name)]
        entries = [entry for key in keys if (entry := self.find(key)) is not None]
        return sorted(entries, key=lambda entry: -entry.created)

    def clear(self) -> int:
        """Remove all entries, damaged ones and left-overs of killed processes too. Return the
        bytes.

        Other files of the folder, such as recorded lengths of steps, stay.
        """
        freed = 0
        for path in self.folder.iterdir():
            if _CONTENT.fullmatch(path.name) or path.name.startswith(_WORK):
                files = (
                    [path]
                    if path.is_file()
                    else [file for file in path.rglob("*") if file.is_file()]
                )
                freed += sum(file.stat().st_size for file in files)
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                    missing_ok=True
                )
        return freed

    def export(self, archive: Path) -> list[Entry]:
        """Write all undamaged entries into a .tar.gz for another machine of the same kind.

        Raise `OSError` if the archive cannot be written.
        """
        entries = self.entries()
        # Write to a temporary file first, so that no reader finds half an archive, also if the disk
        # is full.
        aside = archive.with_name(f"{archive.name}.{os.getpid()}")
        try:
            with tarfile.open(aside, "w:gz") as tar:
                for name in sorted(
                    {entry.content for entry in entries}
                    | {f"{entry.key}.json" for entry in entries}
                ):
                    tar.add(self.folder / name, arcname=name)
            os.replace(aside, archive)
        finally:
            aside.unlink(missing_ok=True)
        return entries

    def import_(self, archive: Path) -> list[Entry]:
        """Import the entries of an archive that `export` wrote. Their code will run: trust its
        source.

        If the file is not such an archive or is damaged, raise `ValueError` and import nothing.
        """
        if not archive.is_file():
            raise ValueError(f"{archive}: there is no such file")
        try:
            with self.work_folder() as folder:
                found = CompileCache(folder / "found")
                _unpack(archive, folder / "archive.tar", found.folder)
                entries = found.entries()
                expected = {entry.content for entry in entries} | {
                    f"{entry.key}.json" for entry in entries
                }
                if not entries or {path.name for path in found.folder.iterdir()} != expected:
                    raise ValueError("entries are missing or damaged")
                for entry in entries:
                    copy = folder / f"copy{Path(entry.content).suffix}"
                    shutil.copyfile(found.folder / entry.content, copy)
                    self.put(entry.key, copy, entry.about)
                return entries
        except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
            raise ValueError(
                f"{archive} is no whole archive of a compile cache: {error}"
            ) from error


def _with_remedy(error: UnusableFolder | str) -> UnusableFolder:
    return UnusableFolder(f"{error}; choose another folder with PIECEWORK_CACHE_DIR")


def _unpack(archive: Path, aside: Path, folder: Path) -> None:
    """Extract the files of an archive into `folder`.

    Only plain files with names of this cache are accepted, so nothing is written elsewhere.
    """
    # Decompress all of it first: gzip has its checksum at the end, and tarfile takes a damaged
    # header for the end of the archive.
    with gzip.open(archive) as packed, open(aside, "wb") as tar_file:
        shutil.copyfileobj(packed, tar_file)
    with tarfile.open(aside, "r:") as tar:
        for member in tar:
            if not member.isfile() or not (
                _ENTRY.fullmatch(member.name) or _CONTENT.fullmatch(member.name)
            ):
                raise ValueError(f"it holds {member.name!r}")
            tar.extract(member, folder, filter="data")


def _hash(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
