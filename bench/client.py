"""The HTTP client of all measurements: a connection pool, JSON, and server-sent events with their
times.
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
    """The server cannot answer any request, for a reason that the user can correct. The text is one
    line.
    """


class RequestFailed(Exception):
    """A request has no usable answer.

    `reason` is short and equal for similar failures, so that failures can be counted by it.
    `status` and `retry_after` are those of the HTTP answer, or None if there was none.
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
    """A server-sent event: its JSON, and its arrival time in `time.perf_counter()` seconds."""

    data: Any
    time: float


class Client:
    """A client of one server with a shared connection pool. Use it as `async with Client(target)`.

    The methods raise `RequestFailed`. If a request is cancelled, or `events()` is closed, its
    connection is closed.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"Content-Type": "application/json"}
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # The caller limits the number of concurrent requests.
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
        """Return the body of an answer with status 200."""
        with _as_failure():
            async with self._session.get(self.target.base_url + path) as response:
                return await _body(response)

    async def get_json(self, path: str) -> Any:
        with _as_failure():
            return msgspec.json.decode(await self.get(path))

    async def post(self, path: str, body: Any) -> Any:
        """Return the JSON of an answer with status 200."""
        with _as_failure():
            async with self._session.post(
                self.target.base_url + path, data=msgspec.json.encode(body)
            ) as response:
                return msgspec.json.decode(await _body(response))

    async def events(self, path: str, body: Any) -> AsyncGenerator[Event, None]:
        """Yield the events of a streamed answer up to `[DONE]`.

        Raises `RequestFailed` if an event holds an error, or if `[DONE]` is missing.
        """
        decoder, done = SSEDecoder(), False
        with _as_failure():
            async with self._session.post(
                self.target.base_url + path, data=msgspec.json.encode(body)
            ) as response:
                if response.status != 200:
                    await _body(response)
                # Read to the end of the body, after [DONE]: otherwise the connection cannot be
                # reused.
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
    """Return `target` with the name of a model, if its API needs one. Without --model, this is the
    first model that the server lists.

    Raises `ServerUnusable` if no request can succeed: no server listens, the key is wrong, or the
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
    """Return OpenAI's `error.message` of an error's body, or the beginning of any other body."""
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
    """Turn every error of the connection or the data into `RequestFailed`."""
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
