"""Stores JSON in one SQLite file, which is bounded in bytes and age and used by one server.

    database = Database(path, max_bytes=2**28, max_age=30 * 86400)
    database.put("resp_1", content, own)
    database.get("resp_1")        # its size in bytes, `content` and `own`

All calls must come from one thread. They raise `sqlite3.Error` if the file cannot be read or
written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger(__name__)

MEMORY = ":memory:"
_OURS = 0x50575253  # SQLite's application id of our files.
_ROW_BYTES = 4096  # Upper limit of the bytes that a row takes beside its content.
MAX_READ = 16 * 2**20  # Bytes of stored rows that one request may load.
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    previous TEXT,
    status TEXT NOT NULL,
    used REAL NOT NULL,
    size INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
"""


class Row(NamedTuple):
    """A stored row: its size in bytes, its two parts as JSON, and `previous` of `put`."""

    size: int
    content: bytes
    own: bytes
    previous: str | None


def connect(path: str) -> sqlite3.Connection:
    """Open the file and lock it until it is closed. Raise `OSError` or `sqlite3.Error`."""
    if path != MEMORY:
        # Only the owner may read conversations. A file that exists is not opened here: closing it
        # would end every lock that this process has on it.
        Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            # A link may name a file that does not exist yet.
            os.close(os.open(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        # Lock before the first read. Otherwise other processes could read the file, too.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        (ours,) = connection.execute("PRAGMA application_id").fetchone()
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and ours != _OURS:
            raise sqlite3.DatabaseError("it is the database of another program")
        for setting in (
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = ON",
            f"application_id = {_OURS}",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
        connection.executescript(f"BEGIN EXCLUSIVE; {_TABLE} COMMIT;")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class Database:
    """Rows of JSON under ids.

    If the rows exceed `max_bytes`, the least recently used rows are deleted. Rows that were not
    used for `max_age` seconds are deleted, too. If `path` cannot be opened, memory is used instead.
    """

    def __init__(
        self,
        path: str,
        *,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._max_bytes, self._max_age = max_bytes, max_age
        self._clock = clock
        self._size = 0
        self._opened: sqlite3.Connection | None = None

    def put(
        self,
        row_id: str,
        content: bytes,
        own: bytes,
        *,
        previous: str | None = None,
        status: str = "completed",
    ) -> bool:
        """Store a row or its new state. Return False if the row is too large.

        `previous` is the id of the row before, or whose row it is. A replaced row keeps its place
        in `listed`.
        """
        size = len(content) + len(own) + _ROW_BYTES
        if size > self._max_bytes:
            logger.warning(
                "%d bytes are not stored: they are more than --responses-store-size", size
            )
            return False
        with self._transaction() as connection:
            row = connection.execute(
                "SELECT rowid FROM responses WHERE id = ?", (row_id,)
            ).fetchone()
            self._drop("id = ?", row_id)
            self._drop("used < ?", self._clock() - self._max_age)
            while self._size + size > self._max_bytes:
                self._drop("id IN (SELECT id FROM responses ORDER BY used LIMIT 1)")
            connection.execute(
                "INSERT INTO responses (rowid, id, previous, status, used, size, input, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (row and row[0], row_id, previous, status, self._clock(), size, own, content),
            )
            self._size += size
        return True

    def get(self, row_id: str) -> Row | None:
        """Return a row, or None if it is not stored."""
        row = self._connection.execute(
            "SELECT size, response, input, previous FROM responses WHERE id = ? AND used >= ?",
            (row_id, self._clock() - self._max_age),
        ).fetchone()
        return row and Row(*row)

    def listed(self, begins: str, previous: str) -> list[tuple[str, bytes]]:
        """Return id and content of the rows whose id begins with `begins`, oldest first.

        At most the newest rows of `MAX_READ` bytes are returned.
        """
        rows = self._connection.execute(
            "SELECT id, response, size FROM responses "
            "WHERE substr(id, 1, ?) = ? AND previous = ? AND used >= ? ORDER BY rowid DESC",
            (len(begins), begins, previous, self._clock() - self._max_age),
        )
        found, left = [], MAX_READ
        for row_id, content, size in rows:
            left -= size
            if left < 0:
                break
            found.append((row_id, content))
        return found[::-1]

    def touch(self, ids: Iterable[str]) -> None:
        """Mark rows as used now. A file that cannot be written is ignored."""
        with contextlib.suppress(sqlite3.Error), self._transaction() as connection:
            used = [(self._clock(), row_id) for row_id in ids]
            connection.executemany("UPDATE responses SET used = ? WHERE id = ?", used)

    def delete(self, row_id: str) -> bool:
        """Delete a row. Return False if there is none."""
        with self._transaction():
            return self._drop("id = ?", row_id) > 0

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def end_unfinished(self, live: tuple[str, ...], error: Any) -> None:
        """Mark the rows that an earlier server left in a state of `live` as failed."""
        connection = self._connection
        marks = ", ".join("?" * len(live))
        rows = connection.execute(
            f"SELECT id, response FROM responses WHERE status IN ({marks})", live
        ).fetchall()
        for row_id, content in rows:
            failed = {**msgspec.json.decode(content), "status": "failed", "error": error}
            connection.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE id = ?",
                (msgspec.json.encode(failed), row_id),
            )

    def _drop(self, where: str, *values: Any) -> int:
        """Delete rows and return their number."""
        rows = self._connection.execute(
            f"DELETE FROM responses WHERE {where} RETURNING size", values
        ).fetchall()
        self._size -= sum(size for (size,) in rows)
        return len(rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection, size = self._connection, self._size
        connection.execute("BEGIN")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            self._size = size
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            try:
                self._opened = connect(self._path)
            except (OSError, sqlite3.Error) as error:
                logger.warning(
                    "responses are kept in memory alone: %s: %s; --responses-store FILE keeps "
                    "them elsewhere",
                    self._path,
                    error,
                )
                self._opened = connect(MEMORY)
            self._size = self._opened.execute("SELECT total(size) FROM responses").fetchone()[0]
            self._opened.execute("PRAGMA incremental_vacuum").fetchall()
        return self._opened
