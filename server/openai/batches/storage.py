"""The folder of files and batches: a JSON file describes each, and its content is beside it.

    folder/lock                       held by the server that uses it
    folder/files/ID.json, ID.content
    folder/batches/ID.json, ID.output, ID.errors    the last two while it runs

All contents together are limited in bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from ....runtime.files.kept_folder import hold_lock
from .records import BatchRecord, FileRecord, Purpose

logger = logging.getLogger(__name__)

MAX_FILES = 2000
MAX_BATCHES = 2000  # Above this number, the oldest ended batches are deleted.
LIFETIME = 30 * 24 * 3600  # Seconds for which files and ended batches are kept. OpenAI's value.
R = TypeVar("R", FileRecord, BatchRecord)


class StorageFull(OSError):
    """The storage is full, by its limits or by the disk."""


class Storage:
    """Opens the folder and loads its records. Use it from one thread at a time.

    Raise `OSError` if the folder cannot be used or another server uses it.
    """

    def __init__(
        self, folder: Path, most_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._most, self.clock = folder, most_bytes, clock
        for part in ("files", "batches"):
            (folder / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = hold_lock(folder / "lock")
        self.files = _load(folder / "files", FileRecord)
        self.batches = _load(folder / "batches", BatchRecord)
        self._drop_strangers()
        # Size of all contents.
        self.bytes = sum(
            path.stat().st_size for part in ("files", "batches") for path in self._contents(part)
        )

    def close(self) -> None:
        self._lock.close()

    # Files.

    def add_file(self, content: IO[bytes], filename: str, purpose: Purpose) -> FileRecord:
        """Store a copy of `content`. Raise `StorageFull` or `OSError`."""
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        self._check_room_for_file()
        self.claim(size)
        record = self._new_file(filename, purpose, size)
        try:
            with open(self.content(record), "xb") as copy:
                shutil.copyfileobj(content, copy, 2**20)
            self._save(record)
        except BaseException:
            self.content(record).unlink(missing_ok=True)
            self.bytes -= size
            raise
        self.files[record.id] = record
        return record

    def take_file(self, path: Path, filename: str) -> FileRecord:
        """Make a file of a batch's results. Raise `OSError`."""
        record = self._new_file(filename, "batch_output", path.stat().st_size)
        self._save(record)
        os.replace(path, self.content(record))
        self.files[record.id] = record
        return record

    def delete_file(self, record: FileRecord) -> None:
        del self.files[record.id]
        self._remove(self._about(record))
        self._remove(self.content(record))

    def content(self, record: FileRecord) -> Path:
        """Return the path of a file's content."""
        return self._folder / "files" / f"{record.id}.content"

    def _new_file(self, filename: str, purpose: Purpose, size: int) -> FileRecord:
        now = int(self.clock())
        return FileRecord(
            id=f"file-{secrets.token_hex(16)}",
            bytes=size,
            created_at=now,
            expires_at=now + LIFETIME,
            filename=filename[:255],
            purpose=purpose,
        )

    # Batches.

    def save_batch(self, record: BatchRecord) -> None:
        """Write a batch's record. Raise `OSError`."""
        self._save(record)
        self.batches[record.id] = record

    def results(self, record: BatchRecord, kind: str) -> Path:
        """Return the path of a running batch's results. `kind` is "output" or "errors"."""
        return self._folder / "batches" / f"{record.id}.{kind}"

    def using(self, file: FileRecord) -> BatchRecord | None:
        """Return a batch that still reads a file, or None."""
        return next(
            (
                batch
                for batch in self.batches.values()
                if not batch.has_ended and batch.input_file_id == file.id
            ),
            None,
        )

    # Limits.

    def claim(self, size: int) -> None:
        """Reserve `size` bytes before they are written. Raise `StorageFull`."""
        if self.bytes + size > self._most:
            raise StorageFull(
                f"files and batches may take {self._most / 2**20:g} MiB together "
                "(--batch-storage); delete some"
            )
        self.bytes += size

    def drop_old(self) -> None:
        """Delete expired files and batches, and the oldest batches above `MAX_BATCHES`."""
        now = self.clock()
        for file in [each for each in self.files.values() if each.expires_at <= now]:
            if self.using(file) is None:
                self.delete_file(file)
        ended = sorted(
            (each for each in self.batches.values() if each.has_ended),
            key=lambda each: each.created_at,
        )
        too_many = len(self.batches) - MAX_BATCHES
        for place, batch in enumerate(ended):
            if place < too_many or batch.created_at + LIFETIME <= now:
                del self.batches[batch.id]
                self._remove(self._about(batch))

    def _check_room_for_file(self) -> None:
        if len(self.files) >= MAX_FILES:
            raise StorageFull(f"there are {MAX_FILES} files already; delete some")

    # On disk.

    def _about(self, record: FileRecord | BatchRecord) -> Path:
        part = "files" if isinstance(record, FileRecord) else "batches"
        return self._folder / part / f"{record.id}.json"

    def _save(self, record: FileRecord | BatchRecord) -> None:
        path = self._about(record)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(record))
        os.replace(part, path)

    def _remove(self, path: Path) -> None:
        try:
            size = path.stat().st_size if path.suffix != ".json" else 0
            path.unlink()
            self.bytes -= size
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)

    def _contents(self, part: str) -> list[Path]:
        return [path for path in (self._folder / part).iterdir() if path.suffix != ".json"]

    def _drop_strangers(self) -> None:
        """Delete what an interrupted server left unfinished."""
        running = {each.id for each in self.batches.values() if not each.has_ended}
        known = {"files": self.files.keys(), "batches": running}
        for part, ids in known.items():
            for path in self._contents(part):
                if path.stem not in ids or path.suffix == ".part":
                    path.unlink(missing_ok=True)
        for file in list(self.files.values()):
            if not self.content(file).exists():
                del self.files[file.id]
                self._about(file).unlink(missing_ok=True)


def _load(folder: Path, kind: type[R]) -> dict[str, R]:
    """Return the records of JSON files, the oldest first. Skip files that cannot be read."""
    records: list[Any] = []
    for path in folder.glob("*.json"):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s is skipped: %s", path, error)
    return {each.id: each for each in sorted(records, key=lambda each: (each.created_at, each.id))}
