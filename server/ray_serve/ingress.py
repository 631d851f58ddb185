"""The ingress of a Ray Serve application: forwards HTTP requests to the replica Ray chooses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import ApiError, BodyTooLarge, ClientGone, Unavailable
from ..http.body import MAX_BODY_BYTES
from ..serving.sse import event
from .request import ForwardedRequest, ResponseStart, routed_text

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_RETRY_SECONDS = 5
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade"})


class Ingress:
    """An ASGI application without a model.

    If a replica ends before anything of the answer was sent, the request is retried on another
    replica. A stream that has begun ends with an error event instead, because another replica would
    generate another text.
    """

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._forward = engines.options(stream=True, method_name="forward")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (kind := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{kind}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            try:
                await self._answer(await _read(scope, receive), scope, send)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)

    async def _answer(self, request: ForwardedRequest, scope: Scope, send: Send) -> None:
        """Forward a request and send its answer. Raises `ApiError` if nothing was sent."""
        for attempt in range(1, _ATTEMPTS + 1):
            parts = self._forward.remote(request)
            started: ResponseStart | None = None
            try:
                async for part in parts:
                    if isinstance(part, ResponseStart):
                        started = part
                        await send(
                            {
                                "type": "http.response.start",
                                "status": part.status,
                                "headers": part.headers,
                            }
                        )
                    else:
                        await _send_body(send, part, more=True)
            except RayActorError as error:
                logger.warning("the replica of a request ended: %s", error)
                if started is not None:
                    await _cut(started, send, scope)
                    return
                if attempt == _ATTEMPTS:
                    raise _gone() from None
                await asyncio.sleep(0.1 * attempt)
            except BackPressureError as error:
                raise _unavailable(f"every replica is full ({error})", "queue_full") from None
            except asyncio.CancelledError:
                parts.cancel()
                raise
            else:
                await _send_body(send, b"", more=False)
                return


def application(engines: DeploymentHandle[Any]) -> ASGIApp:
    return Ingress(engines)


async def _read(scope: Scope, receive: Receive) -> ForwardedRequest:
    """Read a request. Raises `BodyTooLarge` and `ClientGone`."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone("the client went away before its request had ended")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(
                f"The body is larger than {MAX_BODY_BYTES} bytes; send less.", code="body_too_large"
            )
        if not message.get("more_body", False):
            break
    client = scope.get("client")
    return ForwardedRequest(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=[(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP],
        body=bytes(body),
        client=None if client is None else (client[0], client[1]),
        prompt=routed_text(scope["path"], bytes(body)),
    )


async def _cut(started: ResponseStart, send: Send, scope: Scope) -> None:
    """End an answer whose replica has ended.

    A stream ends with an error event. For other answers the connection is closed early, which
    clients notice.
    """
    kind = dict(started.headers).get(b"content-type", b"")
    if not kind.startswith(b"text/event-stream"):
        raise ConnectionError("the replica of this request ended")
    _, answer = _gone().answer_for(scope["path"], "", scope["headers"])
    await _send_body(send, event(answer), more=False)


def _gone() -> ApiError:
    return _unavailable("the replica that had the request ended", "engine_unavailable")


def _unavailable(reason: str, code: str) -> ApiError:
    return Unavailable(
        f"No answer: {reason}. Try again in {_RETRY_SECONDS} s.",
        code=code,
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
