"""Runs one HTTP server and one engine for `piecework serve`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from ..runtime.process.logs import set_up_logging, with_fields
from .auth.accounts import Accounts
from .config.fleet import FleetConfig
from .config.http_limits import HttpLimits, room_for_connections
from .config.server import CommonServerConfig
from .engine.state import EngineState
from .http.connections import Connections
from .http.protocol import BoundedHttpProtocol
from .services import AnyServerConfig, service_of
from .serving.service import Service

logger = logging.getLogger(__name__)

EXIT_ENGINE_GONE = 1
EXIT_USER_ERROR = 2
# Seconds in which clients may read the rest of their answers after the last request has ended.
_CLOSE_TIMEOUT = 5
# Seconds after the drain in which the process ends, even if clients, threads or the engine hang.
END_TIMEOUT = 12
_KILL_TIMEOUT = 3  # The same after a second signal.


def serve(
    config: AnyServerConfig | FleetConfig,
    process: subprocess.Popen[bytes] | None,
    listeners: Sequence[socket.socket],
    began: float,
) -> NoReturn:
    """Serve until a signal or the engine's failure, then end the process with an exit code.

    The exit code is 0 after SIGTERM or SIGINT, 1 if the engine crashed too often, 2 if it could not
    start because of a user error, and 128 + its number after a second signal.

    Args:
        process: An engine process that waits for its job. None for several models, whose
            processes start at the first request.
        listeners: The listening sockets. The summary names the first one's port.
        began: The time of the start by `time.perf_counter`.

    Raises `ValueError` if the model cannot be found or read.
    """
    _set_up_logging(config.log_level)
    if isinstance(config, FleetConfig):
        from .fleet_service import prepare_fleet

        make = prepare_fleet(config)
    else:
        make = service_of(config, process)
    uvloop.run(_launch(config, listeners, make, began))
    raise AssertionError("the process has ended")


async def _launch(
    config: CommonServerConfig,
    listeners: Sequence[socket.socket],
    make: Callable[[], Service],
    began: float,
) -> NoReturn:
    launch = Launch(config, listeners, make(), began)
    # The objects made so far are permanent, so the garbage collector need not check them again.
    gc.freeze()
    try:
        code = await launch.run()
    except Exception:
        logger.exception("the server ends")
        code = EXIT_ENGINE_GONE
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process without waiting for its threads.

    Threads may still tokenise for minutes, for clients that are gone.
    """
    with contextlib.suppress(OSError):  # standard error may be closed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_by(seconds: float, code: int) -> None:
    """End the process with `code` after `seconds`. If no thread can run, SIGALRM ends it later."""

    def end() -> None:
        os.write(
            sys.stderr.fileno(),
            (
                f"piecework serve: the end in order took more than {seconds:g} s, so it is cut "
                "short\n"
            ).encode(),
        )
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, seconds + 2)


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to `Launch`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(app: FastAPI, limits: HttpLimits, *, access_log: bool = False) -> HttpServer:
    """Return the HTTP server of an application, with the `limits` of connections."""
    room = room_for_connections()
    most = limits.max_connections if room is None else min(limits.max_connections, room)
    if most < limits.max_connections:
        logger.warning(
            "--max-connections %d: this process may open files for %d only (ulimit -n)",
            limits.max_connections,
            most,
        )
    connections = Connections(limits, most, app.state.serving.metrics.count_error)
    return HttpServer(
        uvicorn.Config(
            app,
            # uvicorn calls the partial with the same arguments as the class.
            http=cast(Any, partial(BoundedHttpProtocol, connections)),
            ws="none",
            log_config=None,
            access_log=access_log,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT,
            server_header=False,
        )
    )


class Launch:
    """Starts the engine while HTTP is answered, prints the summary, and ends both in order."""

    def __init__(
        self,
        config: CommonServerConfig,
        listeners: Sequence[socket.socket],
        service: Service,
        began: float,
    ) -> None:
        self._began = began
        self._config = config
        self._listeners = [*listeners]
        self._service = service
        self._engine, app, self._summary = service
        self._http = http_server(app, config, access_log=config.log_level == "debug")
        self._accounts: Accounts | None = getattr(app.state, "accounts", None)
        self._reloading: asyncio.Task[None] | None = None
        self._told_to_stop = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal or the engine's failure. Return the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        if self._accounts is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_keys)
        await self._engine.start()
        http = asyncio.create_task(self._http.serve(sockets=self._listeners))
        announcement = asyncio.create_task(self._announce())
        try:
            await self._until_end(http)
            code = await self._finish_requests()
        finally:
            announcement.cancel()
            self._http.should_exit = True
            await asyncio.wait([http])
            await self._engine.stop(
                at_once=self._engine.state not in (EngineState.READY, EngineState.DRAINING)
            )
        http.result()
        return code

    def _reload_keys(self) -> None:
        assert self._accounts is not None
        self._reloading = asyncio.create_task(self._accounts.reload())

    async def _announce(self) -> None:
        if not await self._engine.wait_ready():
            return
        port, seconds = self._listeners[0].getsockname()[1], time.perf_counter() - self._began
        await self._service.settle()
        if self._config.log_format == "json":
            ready = {"port": port, "start_seconds": round(seconds, 3)}
            logger.info("the server is ready", extra=with_fields(ready))
        else:
            print(self._summary(self._engine.info, port, seconds), flush=True)

    async def _until_end(self, http: asyncio.Task[None]) -> None:
        ends = [
            asyncio.create_task(self._told_to_stop.wait()),
            asyncio.create_task(self._service.until_failed()),
        ]
        await asyncio.wait([http, *ends], return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    async def _finish_requests(self) -> int:
        """Wait for unfinished requests unless the engine has failed. Return the exit code."""
        if (reason := self._service.failure) is not None:
            code = EXIT_USER_ERROR if self._service.is_user_error else EXIT_ENGINE_GONE
            return self._give_up(reason, code)
        _end_by(self._config.drain_timeout + END_TIMEOUT, 0)
        await self._engine.drain(self._config.drain_timeout)
        return 0

    def _give_up(self, reason: str, code: int) -> int:
        """Say why the server ends, and return its exit code."""
        _end_by(END_TIMEOUT, code)
        reason = " ".join(reason.split())
        if self._config.log_format == "json":
            logger.critical("the server ends: %s", reason)
        else:
            print(f"piecework serve: error: {reason}", file=sys.stderr, flush=True)
        return code

    def _signalled(self, number: int) -> None:
        """The first signal starts the drain, the second ends the process at once."""
        if not self._told_to_stop.is_set():
            timeout = self._config.drain_timeout
            logger.info(
                "stopping: running requests get %g s to finish (--drain-timeout); a second signal "
                "ends at once",
                timeout,
            )
            self._told_to_stop.set()
        elif self._ending is None:
            self._ending = asyncio.create_task(self._end_now(128 + number))

    async def _end_now(self, code: int) -> None:
        _end_by(_KILL_TIMEOUT, code)
        await self._engine.stop(at_once=True)
        os._exit(code)


def _set_up_logging(level: str) -> None:
    set_up_logging(level)
    if level != "debug":
        # The info messages of uvicorn repeat the summary.
        logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
