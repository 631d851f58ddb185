"""Blocks on disk, in files that several processes and machines share.

A process appends to segments of its own, and reads those of all others. No process writes a file
that another one writes, so no locks are needed, on NFS neither. A segment is a sequence of records:

    magic (4 bytes) | length (8 bytes) | checksum of the payload (4) | checksum of this header (4)
    | key (20 bytes) | payload

Numbers are little endian, checksums are CRC-32. The index is in memory: it is made from the headers
when the folder is opened, and extended when files have grown. A record that is cut off or damaged
counts as missing.

Data is written without fsync: after a power failure the end of a segment may be missing or damaged.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ..cache.kv_events import KVEvents
from .store import KEY_BYTES, Buffer

logger = logging.getLogger(__name__)

_MAGIC = b"PWK1"
_HEADER = struct.Struct("<4sQII")
_RECORD = _HEADER.size + KEY_BYTES  # Bytes before the payload.
_SUFFIX = ".blocks"
_SEGMENTS = 16  # A full folder has at least so many segments, of which the oldest is deleted.
_LEAST, _MOST = 1 << 20, 1 << 28  # Bytes of a segment.
_MOST_FILES = 256  # Each is kept open. A process that writes little leaves a small one.
_LOOK_SECONDS = 1.0  # Time between two looks at the files of other processes.
_RETRY_SECONDS = 60.0  # Time without writing after a write failed.
_TOUCH_SECONDS = 60.0  # A segment's time of use is this exact.


class _Place(NamedTuple):
    segment: _Segment
    offset: int  # Where the payload begins.
    length: int
    checksum: int


class _Segment:
    """A file, and how much of it is in the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Not closed explicitly, because another thread may be reading a block.
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.indexed = self.size = 0
        self.is_damaged = False
        self.touched = 0.0

    def records(self) -> Iterator[tuple[bytes, _Place]]:
        """Yield the records from `indexed` on. Stop before one that is not whole yet."""
        self.size = os.fstat(self.file.fileno()).st_size
        while not self.is_damaged and self.indexed + _RECORD <= self.size:
            head = os.pread(self.file.fileno(), _RECORD, self.indexed)
            if len(head) < _RECORD:
                return
            magic, length, checksum, own = _HEADER.unpack_from(head)
            key = head[_HEADER.size :]
            end = self.indexed + _RECORD + length
            if magic != _MAGIC or own != _header_checksum(length, checksum, key):
                self.is_damaged = True  # The next header cannot be found.
            elif end <= self.size:
                yield key, _Place(self, self.indexed + _RECORD, length, checksum)
                self.indexed = end
            else:
                return


class Segments:
    """The blocks in a folder, at most `max_bytes` of files.

    >>> blocks = Segments(Path("/var/cache/kv"), 10 << 30)
    >>> blocks.put(key, payload)
    >>> blocks.get(key, buffer)  # True if the buffer now holds the payload.

    If the files take more, the segment whose blocks were used least recently is deleted. Errors of
    the file system are logged once and count as missing blocks. All methods may be called from
    several threads.

    Raise `OSError` if the folder can neither be read nor created.
    """

    on_disk, medium = True, "FS"
    events: KVEvents | None = None

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.max_bytes = folder, max_bytes
        self._segment_bytes = min(max(max_bytes // _SEGMENTS, _LEAST), _MOST)
        self._index: dict[bytes, _Place] = {}
        self._segments: dict[str, _Segment] = {}
        self._own: tuple[_Segment, int] | None = None  # The file that grows, opened for writing.
        self._lock = Lock()
        self._look_due = self._write_due = 0.0
        self._warned: set[str] = set()
        self._look()
        self._prune()

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments, as last seen."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def files(self) -> list[Path]:
        return [segment.path for segment in self._segments.values()]

    def check(self) -> tuple[int, int]:
        """Read all blocks. Return the number of damaged ones, which are dropped, and all bytes."""
        damaged = num_bytes = 0
        for key, place in list(self._index.items()):
            num_bytes += place.length
            damaged += not self.get(key, memoryview(bytearray(place.length)))
        return damaged, num_bytes

    def block_keys(self) -> list[bytes]:
        return list(self._index)

    def has(self, key: bytes) -> bool:
        if key in self._index:
            return True
        with self._lock:
            if time.monotonic() >= self._look_due:
                self._look()
        return key in self._index

    def size_of(self, key: bytes) -> int:
        """Return the bytes of a block; 0 if it is missing."""
        place = self._index.get(key)
        return 0 if place is None else place.length

    def get(self, key: bytes, into: Buffer) -> bool:
        """Read a block into a buffer of its size. Return False if it is missing or damaged."""
        place = self._index.get(key)
        if place is None or place.length != into.nbytes:
            return False
        segment = place.segment
        try:
            whole = os.preadv(segment.file.fileno(), [into], place.offset) == place.length
        except OSError as error:
            self._warn(f"cannot read {segment.path}: {error.strerror}")
            whole = False
        if not whole or zlib.crc32(into) != place.checksum:
            self._warn(f"{segment.path} is damaged: its blocks are computed again")
            with self._lock:
                self._index.pop(key, None)
                self._tell([key], stored=False)
            return False
        now = time.time()
        if now > segment.touched + _TOUCH_SECONDS:
            segment.touched = now
            with suppress(OSError):
                os.utime(segment.path)
        return True

    def put(self, key: bytes, payload: Buffer) -> bool:
        """Append a block. Return False if it could not be written."""
        if key in self._index or time.monotonic() < self._write_due:
            return key in self._index
        length, checksum = payload.nbytes, zlib.crc32(payload)
        own = _header_checksum(length, checksum, key)
        head = _HEADER.pack(_MAGIC, length, checksum, own) + key
        with self._lock:
            try:
                segment, file = self._writable()
                written = os.writev(file, [head, payload])
                if written != len(head) + length:
                    raise OSError(errno.ENOSPC, "the disk is full")
            except OSError as error:
                self._warn(f"cannot write into {self.folder}: {error.strerror}; blocks are lost")
                self._write_due = time.monotonic() + _RETRY_SECONDS
                self._close_own()
                return False
            self._index[key] = _Place(segment, segment.size + _RECORD, length, checksum)
            self._tell([key], stored=True)
            segment.size += written
            segment.indexed = segment.size
            if segment.size >= self._segment_bytes:
                self._close_own()
                self._prune()
        return True

    def prune(self, max_bytes: int) -> int:
        """Delete the least recently used segments until the rest fits. Return the bytes freed."""
        with self._lock:
            self._look()
            self.max_bytes, before = max_bytes, self.num_bytes
            self._close_own()
            self._prune()
            return before - self.num_bytes

    def close(self) -> None:
        with self._lock:
            self._close_own()
            self._segments, self._index = {}, {}

    def _look(self) -> None:
        """Index what other processes have written since the last look."""
        self._look_due = time.monotonic() + _LOOK_SECONDS
        try:
            names = {entry.name for entry in os.scandir(self.folder) if _is_segment(entry)}
        except OSError as error:
            self._warn(f"cannot read {self.folder}: {error.strerror}")
            return
        for name in self._segments.keys() - names:
            self._forget(self._segments[name])
        for name in names:
            try:
                if (segment := self._segments.get(name)) is None:
                    segment = self._segments[name] = _Segment(self.folder / name)
                if self._own is None or segment is not self._own[0]:
                    new = list[bytes]()
                    for key, place in segment.records():
                        if self._index.setdefault(key, place) is place:
                            new.append(key)
                    self._tell(new, stored=True)
            except OSError as error:
                self._warn(f"cannot read {self.folder / name}: {error.strerror}")

    def _writable(self) -> tuple[_Segment, int]:
        """Return the segment that grows."""
        if self._own is not None and not os.fstat(self._own[1]).st_nlink:
            self._close_own()  # Another process deleted it.
        if self._own is None:
            path = self.folder / f"{uuid.uuid4().hex}{_SUFFIX}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            file = os.open(path, flags, 0o600)
            try:
                if os.fstat(file).st_uid != os.geteuid():
                    os.unlink(path)
                    raise OSError(errno.EPERM, "its files get another owner (NFS: no_root_squash)")
                segment = self._segments[path.name] = _Segment(path)
            except OSError:
                os.close(file)
                raise
            self._own = segment, file
        return self._own

    def _close_own(self) -> None:
        if self._own is not None:
            (segment, file), self._own = self._own, None
            try:
                os.close(file)
            except OSError as error:  # NFS tells here what it could not write.
                self._warn(f"{segment.path} may lack blocks: {error.strerror}")

    def _prune(self) -> None:
        while self.num_bytes > self.max_bytes or len(self._segments) > _MOST_FILES:
            times = dict[str, float]()
            for name, segment in self._segments.items():
                with suppress(OSError):
                    times[name] = segment.path.stat().st_mtime
            oldest = min(self._segments, key=lambda name: times.get(name, 0.0))
            try:
                os.unlink(self.folder / oldest)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._warn(f"cannot delete {self.folder / oldest}: {error.strerror}")
                return
            self._forget(self._segments[oldest])

    def _forget(self, segment: _Segment) -> None:
        del self._segments[segment.path.name]
        gone = [key for key, place in self._index.items() if place.segment is segment]
        self._index = {key: place for key, place in self._index.items()
                       if place.segment is not segment}  # fmt: skip
        self._tell(gone, stored=False)
        if self._own is not None and self._own[0] is segment:
            self._close_own()

    def _tell(self, keys: list[bytes], *, stored: bool) -> None:
        if self.events is not None:
            self.events.changed_below(keys, self.medium, stored=stored)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("KV cache on disk: %s", text)


def _is_segment(entry: os.DirEntry[str]) -> bool:
    """Whether a file is a segment that this user wrote: others could write wrong blocks."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return (
        entry.name.endswith(_SUFFIX)
        and entry.is_file(follow_symlinks=False)
        and status.st_uid == os.geteuid()
    )


def _header_checksum(length: int, checksum: int, key: bytes) -> int:
    return zlib.crc32(struct.pack("<QI", length, checksum) + key)
