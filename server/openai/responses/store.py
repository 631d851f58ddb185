"""Stores responses in one SQLite file, which is bounded in bytes and age and used by one server.

    store = ResponseStore(path, max_bytes=2**28, max_age=30 * 86400)
    store.put(response, items)        # items: its own input
    store.history(response["id"])     # all items up to now, its output included

All calls must come from one thread. They raise `sqlite3.Error` if the file cannot be read or
written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidRequest, NotFound
from ...core.limits import MAX_MESSAGES
from .items import ITEM_ID, Item
from .response import LIVE, RESPONSE_ID, ResponseAnswer, ResponseError

logger = logging.getLogger(__name__)

MEMORY = ":memory:"
_OURS = 0x50575253  # SQLite's application id of our files.
_ROW_BYTES = 4096  # Upper limit of the bytes that a row takes beside its content.
_MAX_READ = 16 * 2**20  # Bytes of stored responses that one request may load.
_INTERRUPTED = ResponseError(
    "server_error", "The server ended while it made this response; create it again."
)
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


class _Head(msgspec.Struct):
    id: str
    previous_response_id: str | None
    status: str


class Stored(NamedTuple):
    """A response in the API's format, and its own input."""

    response: dict[str, Any]
    items: list[Item]


def connect(path: str) -> sqlite3.Connection:
    """Open the file and lock it until it is closed. Raise `OSError` or `sqlite3.Error`."""
    if path != MEMORY:
        # Only the owner may read conversations.
        Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
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


class ResponseStore:
    """The stored responses.

    If they exceed `max_bytes`, the least recently used responses are deleted. Responses that were
    not used for `max_age` seconds are deleted, too. If `path` cannot be opened, memory is used
    instead.
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

    def put(self, response: ResponseAnswer | dict[str, Any], items: Sequence[Item]) -> None:
        """Store a response or its new state."""
        content, own = msgspec.json.encode(response), msgspec.json.encode(items)
        size = len(content) + len(own) + _ROW_BYTES
        if size > self._max_bytes:
            logger.warning(
                "a response of %d bytes is not stored: it is larger than --responses-store-size",
                size,
            )
            return
        with self._transaction() as connection:
            head = msgspec.json.decode(content, type=_Head)
            self._drop("id = ?", head.id)
            self._drop("used < ?", self._clock() - self._max_age)
            while self._size + size > self._max_bytes:
                self._drop("id IN (SELECT id FROM responses ORDER BY used LIMIT 1)")
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    head.id,
                    head.previous_response_id,
                    head.status,
                    self._clock(),
                    size,
                    own,
                    content,
                ),
            )
            self._size += size

    def get(self, response_id: str) -> Stored | None:
        """Return a response, or None if it is not stored."""
        row = self._row(response_id)
        return row and Stored(*map(msgspec.json.decode, row[1:]))

    def delete(self, response_id: str) -> bool:
        """Delete a response. Return False if there is none."""
        with self._transaction():
            return self._drop("id = ?", response_id) > 0

    def history(self, response_id: str) -> list[Item]:
        """Return input and output of a response and all previous ones, oldest first.

        Raise `NotFound`, or `InvalidRequest` if the conversation is too long.
        """
        turns: list[Stored] = []
        following: str | None = response_id
        left = _MAX_READ
        while following is not None:
            row = self._row(following)
            if row is None:
                where = "" if following == response_id else f", which {response_id} goes on from,"
                raise NotFound(
                    f"The previous response {following!r:.100}{where} is not stored; send the "
                    "whole conversation as input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            left -= row[0]
            if left < 0 or len(turns) >= MAX_MESSAGES:
                raise _too_long("previous_response_id")
            turn = Stored(*map(msgspec.json.decode, row[1:]))
            if turn.response["status"] not in ("completed", "incomplete"):
                raise InvalidRequest(
                    f"The previous response {following!r:.100} is {turn.response['status']}; "
                    "name one that is completed.",
                    param="previous_response_id",
                    code="previous_response_not_completed",
                )
            turns.append(turn)
            following = turn.response["previous_response_id"]
        with contextlib.suppress(sqlite3.Error), self._transaction() as connection:
            used = [(self._clock(), turn.response["id"]) for turn in turns]
            connection.executemany("UPDATE responses SET used = ? WHERE id = ?", used)
        return [
            item for turn in reversed(turns) for item in (*turn.items, *turn.response["output"])
        ]

    def items(self, ids: Iterable[str]) -> dict[str, Item]:
        """Return items of stored responses by their ids. Missing items are left out.

        Raise `InvalidRequest` if the responses are too long.
        """
        keys = {match[1] for item_id in ids if (match := ITEM_ID.fullmatch(item_id))}
        found: dict[str, Item] = {}
        left = _MAX_READ
        for key in keys:
            if (row := self._row(f"{RESPONSE_ID}{key}")) is not None:
                left -= row[0]
                if left < 0:
                    raise _too_long("input")
                turn = Stored(*map(msgspec.json.decode, row[1:]))
                found |= {item["id"]: item for item in (*turn.items, *turn.response["output"])}
        return found

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _row(self, response_id: str) -> tuple[int, bytes, bytes] | None:
        """Return size, response and input of a row."""
        row: tuple[int, bytes, bytes] | None = self._connection.execute(
            "SELECT size, response, input FROM responses WHERE id = ? AND used >= ?",
            (response_id, self._clock() - self._max_age),
        ).fetchone()
        return row

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
            self._begin(self._opened)
        return self._opened

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Mark the responses that an earlier server left unfinished as failed."""
        rows = connection.execute(
            f"SELECT id, response FROM responses WHERE status IN {LIVE}"
        ).fetchall()
        for response_id, content in rows:
            failed = {**msgspec.json.decode(content), "status": "failed", "error": _INTERRUPTED}
            connection.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE id = ?",
                (msgspec.json.encode(failed), response_id),
            )
        self._size = connection.execute("SELECT total(size) FROM responses").fetchone()[0]
        connection.execute("PRAGMA incremental_vacuum").fetchall()


def _too_long(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the stored conversation is too long; send the part that matters as input.",
        param=param,
        code="context_length_exceeded",
    )
