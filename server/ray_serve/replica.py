"""A replica of Ray Serve: one engine process and the application that serves it, without a port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Scope

from ..engine.spawn import spawn
from ..engine.state import EngineState
from ..services import AnyServerConfig, service_of
from .autoscaling import QUEUED, RUNNING
from .request import ForwardedRequest, ResponseStart

logger = logging.getLogger(__name__)


class Replica:
    """A replica. Ray calls `forward`, `check_health` and `record_autoscaling_stats`.

    The engine process is supervised as in any server: after a crash it is restarted, its requests
    resume, and the replica stays.
    """

    async def __init__(self, config: AnyServerConfig) -> None:  # type: ignore[misc]
        """Start the engine. Ray awaits this.

        Raises `RuntimeError` if the engine cannot start. Ray then logs the reason and retries.
        """
        process = spawn(config.engine_command)
        try:
            self._engine, self._app, _ = service_of(config, process)()
        except BaseException:
            process.kill()
            raise
        self._life = contextlib.AsyncExitStack()
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        await self._engine.start()
        if not await self._engine.wait_ready():
            await self._engine.stop(at_once=True)
            raise RuntimeError(f"the engine cannot start: {self._engine.failure}")

    async def __del__(self) -> None:
        """Stop the engine. Ray awaits this after the requests have ended or timed out."""
        await self._engine.stop(at_once=self._engine.state is not EngineState.READY)
        await self._life.aclose()

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine has failed. Ray then replaces the replica."""
        if self._engine.failed.is_set():
            raise RuntimeError(f"the engine is gone: {self._engine.failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of sequences in the engine, for `queue_length`."""
        stats = self._engine.stats
        if stats is None:
            return {}
        return {RUNNING: stats.running_requests, QUEUED: stats.queued_requests}

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
        """Yield a `ResponseStart`, then the parts of the body.

        If the generator is closed or cancelled, the request is aborted as if its client had gone.
        """
        async for part in ask(self._app, request):
            yield part


async def ask(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
    """Yield the answer of an application to a request without a connection."""
    parts: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
    gone = asyncio.Event()
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message | None) -> None:
        if not gone.is_set():  # afterwards the queue is not read and may be full
            await parts.put(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {},
    }

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            await send(None)

    task = asyncio.create_task(run())
    is_answered = False
    try:
        while (message := await parts.get()) is not None:
            if message["type"] == "http.response.start":
                yield ResponseStart(message["status"], list(message["headers"]))
            elif message.get("body"):
                yield bytes(message["body"])
            is_body = message["type"] == "http.response.body"
            is_answered = is_body and not message.get("more_body", False)
        try:
            await task
        except Exception:
            if not is_answered:
                raise
            # The answer was sent. The application raises the error again for the log.
            logger.exception("a request failed")
    finally:
        gone.set()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
