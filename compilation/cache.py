"""The compile cache on disk: files named by the hash of all they depend on, shared by every server
of a machine.

    <folder>/<key>.json           what an entry is, and the hash of its content
    <folder>/<hash><suffix>       the content, named by its own hash: it never changes
    <folder>/<key>.lock           held by the process that is making the entry

Entries are written aside and renamed, content first. An entry whose content is missing or has
another hash is no entry.
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
_PROBE_BYTES = 2**20
"""What must fit on the disk: more than most pieces take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of the cache. `about`: what it is, for people; `created`: seconds since 1970."""

    key: str
    content: str
    num_bytes: int
    created: float
    about: dict[str, Any]


def inductor_folder() -> Path:
    """Where inductor keeps what `torch.compile` makes of models that are not ours."""
    return cache_folder() / "inductor"


def entry_key(parts: Mapping[str, Any]) -> str:
    """The name of an entry that depends on `parts`: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class CompileCache:
    """Files by key. Raises `OSError` where the folder cannot be written; what is not
    whole reads as None.
    """

    def __init__(self, folder: Path) -> None:
        try:
            # What is loaded from here is run: nobody else may write it.
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _with_remedy(f"{folder}: {error.strerror}") from None
        self.folder = folder

    def find(self, key: str) -> Entry | None:
        """An entry whose content is whole; None if there is no such entry or it is damaged."""
        entry = self._read(key)
        return entry if entry is not None and self._is_whole(entry) else None

    def get(self, key: str) -> Path | None:
        """The content of an entry that is whole."""
        entry = self.find(key)
        return None if entry is None else self.folder / entry.content

    def put(self, key: str, file: Path, about: Mapping[str, Any]) -> Path:
        """Make `file`, which lies in `work_folder`, the content of an entry. An older entry of the
        key is replaced.
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
        """Raises `UnusableFolder` where an entry could not be kept: before minutes are spent on
        making it.
        """
        try:
            ensure_room(self.folder, _PROBE_BYTES)
        except UnusableFolder as error:
            raise _with_remedy(error) from None

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """A folder on the cache's disk for files in the making; it is gone afterwards."""
        folder = tempfile.mkdtemp(prefix=_WORK, dir=self.folder)
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Held by one process at a time: those that waited find the entry made. A process that
        dies lets go.
        """
        return locked(self.folder / f"{key}.lock")

    def entries(self) -> list[Entry]:
        """All whole entries, the newest first."""
        keys = [path.stem for path in self.folder.glob("*.json") if _ENTRY.fullmatch(path.name)]
        entries = [entry for key in keys if (entry := self.find(key)) is not None]
        return sorted(entries, key=lambda entry: -entry.created)

    def clear(self) -> int:
        """Remove every entry, damaged ones and left-overs of killed processes too; returns how many
        bytes that were.

        What else lies in the folder, such as the lengths that servers have seen, stays.
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
        """Write all whole entries into a .tar.gz for another machine of the same kind. Raises
        `OSError`.
        """
        entries = self.entries()
        # Aside first: who reads the archive while it is written, or after a full disk, would find
        # half of it.
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
        """Take the entries of an archive that `export` wrote. Their code will be run: it must be
        trusted.

        Raises `ValueError`, and takes nothing, if the file is no such archive or not all of it is
        whole.
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

    def _read(self, key: str) -> Entry | None:
        try:
            data = json.loads((self.folder / f"{key}.json").read_text())
            entry = Entry(key=key, **data)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        described = (
            isinstance(entry.created, int | float)
            and isinstance(entry.num_bytes, int)
            and isinstance(entry.about, dict)
        )
        return (
            entry
            if described and isinstance(entry.content, str) and _CONTENT.fullmatch(entry.content)
            else None
        )

    def _is_whole(self, entry: Entry) -> bool:
        try:
            return _hash(self.folder / entry.content) == entry.content.partition(".")[0]
        except OSError:
            return False


def _with_remedy(error: UnusableFolder | str) -> UnusableFolder:
    return UnusableFolder(f"{error}; choose another folder with PIECEWORK_CACHE_DIR")


def _unpack(archive: Path, aside: Path, folder: Path) -> None:
    """The files of an archive into `folder`: names of our own kind and plain files alone, so that
    nothing is written elsewhere.
    """
    # The whole of it first: gzip has its checksum at the end, and tarfile takes a damaged header
    # for the end.
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
