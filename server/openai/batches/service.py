"""The files and batches of a server, and the task that runs the batches."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, TypeVar, TypeVarTuple, Unpack

from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.routing import Match

from ....runtime.files.kept_folder import kept_folder
from ...config.server import BatchServerConfig
from ...core.errors import InvalidRequest, NotFound, Unavailable
from ...engine.interface import Engine
from ...http.form import Uploads
from .in_process import InProcessAnswer, post
from .records import BatchRecord, FileRecord, Purpose, Status
from .runner import BatchRun
from .storage import Storage, StorageFull

logger = logging.getLogger(__name__)

# Endpoints of lines, if the server has them.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
OFF, AUTO = "none", "auto"
_MAX_WAITING = 200  # Batches that have not ended.
T = TypeVar("T")
A = TypeVarTuple("A")


class Batches:
    """The files and batches of one server.

    The folder is opened at the first use. If it exists at the start, it is opened then, and the
    batches of an earlier server continue.
    """

    def __init__(self, app: FastAPI, engine: Engine, config: BatchServerConfig) -> None:
        self._app, self._engine, self._config = app, engine, config
        self._opened: Storage | None = None
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._running: BatchRecord | None = None
        self.uploads = Uploads()

    async def start(self) -> None:
        """Continue unfinished batches."""
        folder = self._folder
        try:
            if folder is None or not (folder / "batches").is_dir():
                return
            await self.storage()
        except (Unavailable, OSError) as error:
            logger.warning("batches: %s", error)
        else:
            self._run_unfinished()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._opened is not None:
            self._opened.close()

    @property
    def _folder(self) -> Path | None:
        """The folder of files and batches, or None if batches are off."""
        config = self._config
        if config.batch_dir == OFF:
            return None
        if config.batch_dir != AUTO:
            return Path(config.batch_dir).expanduser()
        return kept_folder("batches", config.model_names[0])

    async def storage(self) -> Storage:
        """Return the storage.

        Raise `NotFound` if batches are off, and `Unavailable` if the folder cannot be used.
        """
        folder = self._folder
        if folder is None:
            raise NotFound(
                "This server takes no files and no batches (--batch-dir none).", code="batches_off"
            )
        if self._opened is None:
            try:
                self._opened = await self.disk(self._open, folder)
            except OSError as error:
                reason = (
                    "another server uses it"
                    if isinstance(error, BlockingIOError)
                    else error.strerror or error
                )
                raise Unavailable(
                    f"The folder of files and batches, {folder}, cannot be used: {reason}. Start "
                    "the server with another --batch-dir.",
                    code="batch_dir_unusable",
                    headers={"Retry-After": "60"},
                ) from None
        return self._opened

    def _open(self, folder: Path) -> Storage:
        return self._opened or Storage(folder, self._config.batch_storage * 2**20)

    async def disk(self, work: Callable[[Unpack[A]], T], *args: *A) -> T:
        """Return `work(*args)`, called in a thread, one call at a time."""
        async with self._turn:
            return await asyncio.to_thread(work, *args)

    async def save(self, work: Callable[[Unpack[A]], T], *args: *A) -> T:
        """Call `disk` for a client that stores something.

        Raise `InvalidRequest` if the limits are reached, and `Unavailable` if the disk is full.
        """
        try:
            return await self.disk(work, *args)
        except StorageFull as error:
            raise InvalidRequest(f"No room: {error}.", code="storage_full") from None
        except OSError as error:
            raise Unavailable(
                f"It cannot be written to disk: {error.strerror}.",
                code="disk_full",
                headers={"Retry-After": "60"},
            ) from None

    # Files.

    async def file(self, file_id: str) -> FileRecord:
        storage = await self.storage()
        return await self.disk(_found, storage, file_id)

    async def add_file(self, content: IO[bytes], filename: str, purpose: Purpose) -> FileRecord:
        storage = await self.storage()
        await self.disk(storage.drop_old)
        return await self.save(storage.add_file, content, filename, purpose)

    async def open_file(self, file_id: str) -> tuple[FileRecord, IO[bytes]]:
        """Return a file and its open content, which stays readable if the file is deleted."""
        storage = await self.storage()
        return await self.disk(self._open_file, storage, file_id)

    async def delete_file(self, file_id: str) -> None:
        storage = await self.storage()
        await self.disk(self._delete_file, storage, file_id)

    def _open_file(self, storage: Storage, file_id: str) -> tuple[FileRecord, IO[bytes]]:
        record = _found(storage, file_id)
        try:
            return record, open(storage.content(record), "rb")
        except OSError as error:
            raise Unavailable(
                f"The file cannot be read: {error.strerror}.", code="file_unreadable"
            ) from None

    def _delete_file(self, storage: Storage, file_id: str) -> None:
        record = _found(storage, file_id)
        if (batch := storage.using(record)) is not None:
            raise InvalidRequest(
                f"The batch {batch.id} still reads this file; cancel it first.",
                param="file_id",
                code="file_in_use",
            )
        storage.delete_file(record)

    # Batches.

    async def batch(self, batch_id: str) -> BatchRecord:
        storage = await self.storage()
        if (found := storage.batches.get(batch_id)) is None:
            raise NotFound(f"No such batch: {batch_id!r:.80}.", param="batch_id", code="not_found")
        return found

    async def create(
        self,
        file_id: str,
        endpoint: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None,
    ) -> BatchRecord:
        """Create a batch and run it later. Raise `InvalidRequest`."""
        storage = await self.storage()
        served = [each for each in ENDPOINTS if self._serves(each)]
        if endpoint not in served:
            raise InvalidRequest(
                f"endpoint: this server takes batches of {', '.join(served)}.",
                param="endpoint",
                code="invalid_value",
            )
        waiting = sum(not each.has_ended for each in storage.batches.values())
        if waiting >= _MAX_WAITING:
            raise InvalidRequest(
                f"{waiting} batches are waiting or running; try again when some have ended.",
                code="too_many_batches",
            )
        now = int(storage.clock())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds,
            metadata=metadata,
        )
        await self.save(self._add_batch, storage, record)
        self._run_unfinished()
        return record

    def _add_batch(self, storage: Storage, record: BatchRecord) -> None:
        storage.drop_old()
        if record.input_file_id not in storage.files:
            raise InvalidRequest(
                f"input_file_id: there is no file {record.input_file_id!r:.80}; upload it to "
                "/v1/files.",
                param="input_file_id",
                code="invalid_value",
            )
        storage.save_batch(record)

    async def cancel(self, record: BatchRecord) -> None:
        """Cancel a batch. Raise `InvalidRequest` if it has ended."""
        storage = await self.storage()
        if record.has_ended or record.status is Status.FINALIZING:
            raise InvalidRequest(
                f"The batch is {record.status} and cannot be cancelled any more.",
                param="batch_id",
                code="invalid_value",
            )
        has_begun = record.status is not Status.VALIDATING or record is self._running
        record.become(Status.CANCELLING, storage.clock())
        if not has_begun:
            record.become(Status.CANCELLED, storage.clock())
        await self.save(storage.save_batch, record)
        self._run_unfinished()

    def _serves(self, path: str) -> bool:
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
        return any(route.matches(scope)[0] is Match.FULL for route in self._app.routes)

    def _run_unfinished(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        storage = await self.storage()
        while waiting := [each for each in storage.batches.values() if not each.has_ended]:
            # Cancelled batches are finished first.
            waiting.sort(key=lambda each: each.status is not Status.CANCELLING)
            self._running = record = waiting[0]
            await BatchRun(record, storage, self.disk, self._engine, self._ask).run()
            if not record.has_ended:
                return  # The server is stopping.

    async def _ask(self, path: str, body: bytes) -> InProcessAnswer:
        return await post(self._app, path, body)


def _found(storage: Storage, file_id: str) -> FileRecord:
    """Return a file that exists and has not expired, in a thread. Raise `NotFound`."""
    storage.drop_old()
    if (found := storage.files.get(file_id)) is None:
        raise NotFound(f"No such file: {file_id!r:.80}.", param="file_id", code="not_found")
    return found


async def _batches_of(request: Request) -> Batches:
    found: Batches = request.app.state.batches
    return found


BatchesDep = Annotated[Batches, Depends(_batches_of)]  # Parameter of an endpoint.
