"""HTTP client of a chat: lists models and streams answers.

It uses blocking sockets, so that Ctrl-C interrupts a read at once. Closing the connection stops the
answer on the server.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ...bench.sse import SSEDecoder
from ...bench.target import Target

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0
_MOST_BYTES = 2**24  # Limit of a response that is not a stream.


class ChatError(Exception):
    """A failed request, described in one line."""


class Unavailable(ChatError):
    """The server does not answer, or answers 502, 503 or 504."""


class Part(NamedTuple):
    """A part of an answer. A part of kind `usage` has the server's number of tokens."""

    kind: Literal["reasoning", "content", "usage"]
    text: str
    tokens: int = 0


class ChatClient:
    """A client of one server. Raises `ValueError` if `base_url` is not a URL."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        parts = urlsplit(Target(base_url=base_url).base_url)
        self._parts = parts
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if api_key is not None:
            # Bytes, because http.client encodes text as Latin-1, but the server expects UTF-8.
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def models(self) -> list[str]:
        """Return the names of the served models. Raises `ChatError`."""
        connection, response = self._asked("GET", "/v1/models", None)
        try:
            listed = json.loads(response.read(_MOST_BYTES))["data"]
            return [str(model["id"]) for model in listed]
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            raise ChatError("the server's list of models is malformed") from None
        finally:
            connection.close()

    def answer(
        self, model: str, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> Iterator[Part]:
        """Yield the parts of an answer. Closing the iterator stops the answer.

        Raises `ChatError`, also if the stream breaks off.
        """
        body = {
            **settings,
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection, response = self._asked("POST", "/v1/chat/completions", body)
        try:
            decoder = SSEDecoder()
            while chunk := response.read1(65_536):
                for data in decoder.feed(chunk):
                    if data == b"[DONE]":
                        return
                    yield from _parts(data)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the answer broke off: {_reason(error)}") from None
        finally:
            connection.close()
        raise ChatError("the answer broke off before its end")

    def wait(self, seconds: float) -> Iterator[float]:
        """Yield the elapsed seconds, about 5 times per second, until the server is ready.

        Raises `Unavailable` after `seconds`.
        """
        began = time.monotonic()
        while True:
            try:
                connection, _ = self._asked("GET", "/health", None)
                connection.close()
                return
            except Unavailable as error:
                passed = time.monotonic() - began
                if passed > seconds:
                    raise error from None
                yield passed
            time.sleep(0.2)

    def _asked(
        self, method: str, path: str, body: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host, port = self._parts.hostname or "", self._parts.port
        connection = kind(host, port, timeout=CONNECT_SECONDS)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(READ_SECONDS)
            connection.request(method, self._parts.path + path, content, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            message = _message(response.read(_MOST_BYTES)) or response.reason
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            where = f"{self._parts.scheme}://{self._parts.netloc.rpartition('@')[2]}"
            raise Unavailable(f"{where} does not answer: {_reason(error)}") from None
        except BaseException:
            connection.close()
            raise
        connection.close()
        raised = Unavailable if response.status in (502, 503, 504) else ChatError
        raise raised(f"{response.status}: {' '.join(message.split())[:500]}")


def _parts(data: bytes) -> Iterator[Part]:
    """Yield the parts in one event of a stream. Raises `ChatError` for an error event."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_message(data) or "the server reports an error without a message")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Part("reasoning", str(thought))
            if text := delta.get("content"):
                yield Part("content", str(text))
        if usage := event.get("usage"):
            yield Part("usage", "", int(usage.get("completion_tokens") or 0))
    except (ValueError, TypeError, AttributeError):
        raise ChatError("the server's stream is malformed") from None


def _message(content: bytes) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of the body."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
