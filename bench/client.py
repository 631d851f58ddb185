"""The one HTTP client of all measurements: one connection pool, JSON answers, server-sent events
with their arrival times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec

from .sse import SSEDecoder
from .target import Api, Target

MALFORMED = "malformed answer"
_DONE = b"[DONE]"


class ServerUnusable(ValueError):
    """The server cannot be used at all, for a reason that the user can mend; one line."""


class RequestFailed(Exception):
    """One request has no usable answer.

    `reason` is short, and the same for failures that are alike, so that they can be counted.
    `status`: of the HTTP answer, if one came; `retry_after`: its header of that name.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        *,
        status: int | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.status = status
        self.retry_after = retry_after


class Event(NamedTuple):
    """One server-sent event: its JSON, and when it arrived (`time.perf_counter()` seconds)."""

    data: Any
    time: float


class Client:
    """Talks to one server over a shared pool of connections; use it as `async with`.

    Its methods raise `RequestFailed`. Leaving a request early, by cancelling it or by closing
    `events()`, closes its connection.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"Content-Type": "application/json"}
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # How many requests run at once is decided by who sends them.
            connector=aiohttp.TCPConnector(limit=0, force_close=not target.keep_alive),
            timeout=aiohttp.ClientTimeout(total=target.timeout),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body of an answer with status 200."""
        with _as_failure():
            async with self._session.get(self.target.base_url + path) as response:
                return await _body(response)

    async def get_json(self, path: str) -> Any:
        with _as_failure():
            return msgspec.json.decode(await self.get(path))

    async def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer with status 200."""
        with _as_failure():
            async with self._session.post(
                self.target.base_url + path, data=msgspec.json.encode(body)
            ) as response:
                return msgspec.json.decode(await _body(response))

    async def events(self, path: str, body: Any) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer until `[DONE]`; one that holds an error, or the lack of
        `[DONE]`, is a failure.
        """
        decoder, done = SSEDecoder(), False
        with _as_failure():
            async with self._session.post(
                self.target.base_url + path, data=msgspec.json.encode(body)
            ) as response:
                if response.status != 200:
                    await _body(response)
                # Read on behind [DONE], to the end of the body: only then can the connection be
                # used again.
                async for chunk in response.content.iter_any():
                    now = time.perf_counter()
                    for data in decoder.feed(chunk):
                        if done:
                            raise RequestFailed(MALFORMED, "an event follows [DONE]")
                        done = data == _DONE
                        if not done:
                            yield Event(_without_error(msgspec.json.decode(data)), now)
        if not done:
            raise RequestFailed("stream ended early", "the connection was closed before [DONE]")


async def resolve(target: Target) -> Target:
    """`target` with a model's name where requests need one: without --model the first that the
    server lists.

    Raises `ServerUnusable` if no request can work: no server listens, the key is wrong, or the
    server is not ready.
    """
    needs_model = target.model is None and target.api is not Api.GENERATE
    path = "/get_model_info" if target.api is Api.GENERATE else "/v1/models"
    try:
        async with Client(target) as client:
            listed = await client.get_json(path)
        return replace(target, model=listed["data"][0]["id"]) if needs_model else target
    except RequestFailed as error:
        if error.status == 404 and not needs_model:
            return target
        raise ServerUnusable(_why_unusable(target, path, error)) from None
    except (KeyError, IndexError, TypeError):
        raise ServerUnusable(
            f"{target.base_url}{path} lists no model; name one with --model"
        ) from None


def _why_unusable(target: Target, path: str, error: RequestFailed) -> str:
    match error.status:
        case None:
            return (
                f"no server answers at {target.base_url} ({error}); start it, or give its "
                "address with --base-url"
            )
        case 401 | 403:
            return (
                f"the server at {target.base_url} wants a key; give it with --api-key "
                f"({error.detail})"
            )
        case 503:
            return f"the server at {target.base_url} is not ready ({error.detail}); try again later"
        case _:
            return f"{target.base_url}{path} answers {error}; is this the right server?"


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if response.status != 200:
        raise RequestFailed(
            f"HTTP {response.status}",
            _error_message(body),
            status=response.status,
            retry_after=response.headers.get("Retry-After"),
        )
    return body


def _error_message(body: bytes) -> str:
    """What an error's body says: OpenAI's `error.message`, or the beginning of whatever it is."""
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return body[:200].decode(errors="replace")


def _without_error(data: Any) -> Any:
    error = data.get("error") if isinstance(data, dict) else None
    if error:
        raise RequestFailed(
            "error in the stream",
            str(error.get("message", error) if isinstance(error, dict) else error),
        )
    return data


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Raise `RequestFailed` for every error between here and the server."""
    try:
        yield
    except TimeoutError:
        raise RequestFailed("timeout", "no whole answer within --timeout seconds") from None
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed("no connection", error.strerror or str(error)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed("connection lost", str(error) or type(error).__name__) from None
    except msgspec.DecodeError as error:
        raise RequestFailed(MALFORMED, str(error)) from None
