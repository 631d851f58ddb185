"""Runs one batch: sends its lines to the application itself, with the lowest priority.

The number of simultaneous lines leaves room for other clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

import msgspec

from ...engine.interface import Engine
from ...engine.state import EngineState
from .in_process import InProcessAnswer
from .lines import Line, answer_line, answered_ids, check_lines, error_line, read_lines
from .records import BatchCounts, BatchFault, BatchRecord, FileRecord, Status
from .storage import Storage, StorageFull

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = -(2**31)
_LOOK = 0.1  # Seconds between two checks whether the batch continues and whether there is room.
_TRY_AGAIN = 0.5  # Seconds until a line with a "not now" answer is sent again.
_TURNS = 50  # Iterations of the event loop after which a line should have reached the engine.
_READ_AHEAD = 2  # Lines.
# Size of lines in flight. The limit leaves memory for large bodies of other clients.
_MOST_BYTES = 16 * 2**20
_NOT_NOW = 503
# Error codes of a model that cannot be loaded. Retries seldom help.
_CANNOT_LOAD = ("model_failed", "model_does_not_fit")
# Lines of a model that cannot be loaded are retried for this time. A load is tried each 30 s.
_FAILING_SECONDS = 75.0
_STOPPING = (EngineState.DRAINING, EngineState.STOPPED, EngineState.FAILED)
_EXPIRED = "This request could not be executed before the completion window expired."
_TOO_MANY = (
    "too_many_sequences",
    "This line has too many prompts or samples to leave room for others; send several lines.",
)
Ask = Callable[[str, bytes], Coroutine[Any, Any, InProcessAnswer]]
T = TypeVar("T")
A = TypeVarTuple("A")


class Disk(Protocol):
    """Calls a function that uses the storage in a thread, one call at a time."""

    async def __call__(self, work: Callable[[Unpack[A]], T], *args: *A) -> T: ...


class BatchRun:
    """One running batch. `ask` sends a request with a path and a JSON body."""

    def __init__(
        self,
        record: BatchRecord,
        storage: Storage,
        disk: Disk,
        engine: Engine,
        ask: Ask,
    ) -> None:
        self._record, self._storage, self._disk = record, storage, disk
        self._engine, self._ask = engine, ask
        self._under_way = self._bytes = 0
        self._turn = asyncio.Lock()
        # Time of the first failed load of each model, by `time.monotonic`.
        self._failing: dict[str, float] = {}

    async def run(self) -> None:
        """Run the batch until it or the server ends."""
        record = self._record
        try:
            if record.status is Status.VALIDATING:
                await self._validate()
            ending = Status.COMPLETED
            if record.status is Status.IN_PROGRESS:
                ending = await self._answer()
            if record.status is Status.CANCELLING:
                ending = Status.CANCELLED
            if not record.has_ended and not self._is_stopping:
                await self._finish(ending)
        except OSError as error:
            # The limit of all files is reached or the disk is full. Written answers are kept.
            reason = str(error) if isinstance(error, StorageFull) else error.strerror
            logger.warning("batch %s ends: %s", record.id, reason)
            await self._fail("storage_full", f"The answers cannot be written: {reason}.")
        except Exception:
            logger.exception("batch %s ends", record.id)
            await self._fail("internal_error", "Internal error; the server's log has the details.")

    @property
    def _is_stopping(self) -> bool:
        return self._engine.state in _STOPPING

    @property
    def _is_late(self) -> bool:
        return self._storage.clock() >= self._record.expires_at

    @property
    def _input(self) -> FileRecord:
        return self._storage.files[self._record.input_file_id]

    async def _validate(self) -> None:
        record, path = self._record, self._storage.content(self._input)
        total, faults = await asyncio.to_thread(check_lines, path, record.endpoint)
        if record.status is not Status.VALIDATING:
            return  # The batch was cancelled meanwhile.
        if faults:
            record.fail(faults, self._storage.clock())
        else:
            record.request_counts = BatchCounts(total)
            record.become(Status.IN_PROGRESS, self._storage.clock())
        await self._disk(self._storage.save_batch, record)

    # Answers.

    async def _answer(self) -> Status:
        """Send each line that has no answer yet, and return the resulting status."""
        record, counts = self._record, self._record.request_counts
        done, failed = await self._disk(self._answered)
        counts.completed, counts.failed = len(done), len(failed)
        lines = _Lines(self._lines(done | failed))
        most = max(1, (await self._most_running()) * 3 // 4)
        work = asyncio.gather(*[self._work(lines, most) for _ in range(most)])
        try:
            while not work.done() and not self._is_over:
                await asyncio.wait([work], timeout=_LOOK)
            if work.done():
                work.result()
                return Status.COMPLETED
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
        if self._is_late and record.status is Status.IN_PROGRESS and not self._is_stopping:
            counts.failed += await self._disk(self._expire)
        return Status.EXPIRED

    @property
    def _is_over(self) -> bool:
        return self._is_stopping or self._is_late or self._record.status is not Status.IN_PROGRESS

    async def _most_running(self) -> int:
        """Return the number of requests that the engine runs at once, or 1 if it does not get
        ready.
        """
        while self._engine.info is None and not self._is_over:
            await asyncio.sleep(_LOOK)
        return int(self._engine.info.max_running_requests) if self._engine.info is not None else 1

    async def _work(self, lines: _Lines, most: int) -> None:
        while (line := await lines.next()) is not None:
            if line.sequences > max(most, self._engine.capacity // 2):
                status, written = 400, error_line(line.custom_id, *_TOO_MANY)
            else:
                body = msgspec.json.encode({**line.body, "priority": LOWEST_PRIORITY})
                answer = await self._answer_to(body, most, str(line.body.get("model")))
                status = answer.status
                written = answer_line(line.custom_id, status, answer.request_id, answer.body)
            if status == 200:
                await self._disk(self._write, "output", written)
                self._record.request_counts.completed += 1
            else:
                await self._disk(self._write, "errors", written)
                self._record.request_counts.failed += 1

    async def _answer_to(self, body: bytes, most: int, model: str) -> InProcessAnswer:
        """Return the answer of a line, retried until there is room and its model is loaded.

        If the model keeps failing to load, return the error.
        """
        while True:
            asked = await self._begin(body, most)
            try:
                answer = await asked
            finally:
                asked.cancel()
                self._under_way -= 1
                self._bytes -= len(body)
            # The next server repeats lines that the end of this server interrupts.
            if not self._is_stopping:
                if answer.status != _NOT_NOW:
                    self._failing.pop(model, None)
                    return answer
                if _code_of(answer.body) in _CANNOT_LOAD:
                    since = self._failing.setdefault(model, time.monotonic())
                    if time.monotonic() >= since + _FAILING_SECONDS:
                        return answer
            await asyncio.sleep(_TRY_AGAIN)

    async def _begin(self, body: bytes, most: int) -> asyncio.Task[InProcessAnswer]:
        """Send a line when there is room. Lines start one at a time, so that each sees the
        others.
        """
        async with self._turn:
            while (
                max(self._under_way, self._engine.num_unfinished) >= most
                or self._bytes + len(body) > _MOST_BYTES
            ):
                await asyncio.sleep(_LOOK)
            self._under_way += 1
            self._bytes += len(body)
            asked = asyncio.create_task(self._ask(self._record.endpoint, body))
            before = self._engine.num_unfinished
            for _ in range(_TURNS):
                if asked.done() or self._engine.num_unfinished > before:
                    break
                await asyncio.sleep(0)
            return asked

    # On disk, in a thread.

    def _lines(self, answered: set[str]) -> Iterator[Line]:
        return read_lines(self._storage.content(self._input), self._record.endpoint, answered)

    def _answered(self) -> tuple[set[str], set[str]]:
        """Return the ids of lines with an answer, and of lines with an error."""
        output, errors = (self._storage.results(self._record, kind) for kind in _KINDS)
        return answered_ids(output), answered_ids(errors)

    def _write(self, kind: str, line: bytes) -> None:
        self._storage.claim(len(line))
        with open(self._storage.results(self._record, kind), "ab") as file:
            file.write(line)

    def _expire(self) -> int:
        """Write an error for each line without an answer. Return their number."""
        done, failed = self._answered()
        count = 0
        for line in self._lines(done | failed):
            self._write("errors", error_line(line.custom_id, "batch_expired", _EXPIRED))
            count += 1
        return count

    def _make_files(self) -> None:
        """Make files of the results. An interrupted call can be repeated."""
        record, storage = self._record, self._storage
        found: list[str | None] = []
        for kind in _KINDS:
            path, name = storage.results(record, kind), f"{record.id}_{kind}.jsonl"
            made = [
                each.id
                for each in storage.files.values()
                if each.filename == name and each.purpose == "batch_output"
            ]
            if not made and path.exists():
                made = [storage.take_file(path, name).id]
            found.append(made[0] if made else None)
        record.output_file_id, record.error_file_id = found

    # End.

    async def _finish(self, ending: Status) -> None:
        record, storage = self._record, self._storage
        if ending is Status.COMPLETED and record.status is not Status.FINALIZING:
            record.become(Status.FINALIZING, storage.clock())
            await self._disk(storage.save_batch, record)
        await self._disk(self._make_files)
        record.become(ending, storage.clock())
        await self._disk(storage.save_batch, record)

    async def _fail(self, code: str, message: str) -> None:
        with suppress(OSError):
            await self._disk(self._make_files)
        self._record.fail([BatchFault(code, message)], self._storage.clock())
        with suppress(OSError):
            await self._disk(self._storage.save_batch, self._record)


class _Code(msgspec.Struct):
    code: str | None = None


class _Error(msgspec.Struct):
    error: _Code


def _code_of(body: bytes) -> str | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=_Error).error.code
    return None


_KINDS = ("output", "errors")


class _Lines:
    """Reads lines in a thread, a few ahead."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._ready: deque[Line] = deque()
        self._turn = asyncio.Lock()

    async def next(self) -> Line | None:
        async with self._turn:
            if not self._ready:
                ahead = islice(self._lines, _READ_AHEAD)
                self._ready.extend(await asyncio.to_thread(list, ahead))
            return self._ready.popleft() if self._ready else None
