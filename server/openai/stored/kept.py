"""The thread that reads and writes what a server stores, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from ....runtime.files.kept_folder import kept_folder
from ...config.server import ServerConfig
from ...core.errors import InvalidRequest, Unavailable
from .database import MEMORY, Database, connect

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
# Bytes that may wait for the disk. Above that, new answers are not stored.
_MAX_WAITING_BYTES = 64 * 2**20
CLOSE_SECONDS = 2
_DAY = 86400


def store_path(config: ServerConfig) -> str:
    """Return the path of the store. With `auto` each model and port has a file."""
    match config.responses_store:
        case "auto":
            folder = kept_folder("responses", config.model_names[0])
            return str(folder / f"{config.port}.sqlite")
        case "memory":
            return MEMORY
    return config.responses_store


def check_store(config: ServerConfig) -> None:
    """Raise `ValueError` if the configured file cannot be used."""
    if config.responses_store in ("auto", "memory", "off"):
        return
    try:
        connect(config.responses_store).close()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"--responses-store {config.responses_store}: {reason}; name another file, memory or "
            "off"
        ) from None


class Kept:
    """The store of a server.

    Attributes:
        is_on: Whether the server stores anything.
        database: What is stored. Use it only by `ask` and `put`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.is_on = config.responses_store != "off"
        self.database = Database(
            store_path(config),
            max_bytes=config.responses_store_size * 2**20,
            max_age=config.responses_store_days * _DAY,
        )
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="stored")
        self._waiting = 0
        self._is_closed = False

    def require(self, param: str | None = None) -> None:
        """Raise `InvalidRequest` if the server stores nothing."""
        if not self.is_on:
            raise InvalidRequest(
                f"{'' if param is None else param + ': '}this server stores no responses "
                "(--responses-store off): send the whole conversation as input, in the "
                "foreground.",
                param=param,
                code="responses_not_stored",
            )

    async def ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, which runs in the store's thread. Raise `Unavailable`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.thread, partial(work, *args, **kwargs)
            )
        except sqlite3.Error as error:
            logger.warning("stored responses cannot be read: %s", error)
            raise Unavailable(
                "Stored responses cannot be read now; send the whole conversation as input.",
                code="store_unavailable",
            ) from None

    def put(
        self,
        size: int,
        work: Callable[[], object],
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Write something of about `size` bytes by `work`. Later calls of `ask` will find it.

        `then` gets the error, or None. It is not called if the store is closed or has too much to
        write.
        """
        if not self.is_on or self._is_closed:
            return
        if self._waiting > _MAX_WAITING_BYTES:
            logger.warning("a response is not kept: the disk is too slow for so many")
            return
        self._waiting += size

        def written(done: asyncio.Future[object]) -> None:
            self._waiting -= size
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                logger.warning("a response is not kept: %s", error)
            if then is not None:
                then(error)

        done = asyncio.get_running_loop().run_in_executor(self.thread, work)
        done.add_done_callback(written)

    async def close(self) -> None:
        """Write what waits when the server stops."""
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ask(self.database.close), CLOSE_SECONDS)
        self.thread.shutdown(wait=False)
