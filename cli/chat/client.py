"""The server that a chat talks to: its models, and answers as they are written.

Blocking sockets on purpose: Ctrl-C interrupts a read at once, and closing the connection stops the
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
_MOST_BYTES = 2**24
"""Of an answer that is no stream."""


class ChatError(Exception):
    """What went wrong at a request, in one line."""


class Unavailable(ChatError):
    """Nobody answers, or the server says that it will later."""


class Part(NamedTuple):
    """A part of an answer; `usage` is the number of tokens that the server has counted."""

    kind: Literal["reasoning", "content", "usage"]
    text: str
    tokens: int = 0


class ChatClient:
    """Talks to one server. Raises `ValueError` where `base_url` is no URL."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        parts = urlsplit(Target(base_url=base_url).base_url)
        self._parts = parts
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if api_key is not None:
            # As bytes, for http.client writes text as Latin-1 and the server's key is UTF-8.
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def models(self) -> list[str]:
        """The names of what the server serves. Raises `ChatError`."""
        connection, response = self._asked("GET", "/v1/models", None)
        try:
            listed = json.loads(response.read(_MOST_BYTES))["data"]
            return [str(each["id"]) for each in listed]
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            raise ChatError("the server's list of models cannot be read") from None
        finally:
            connection.close()

    def answer(
        self, model: str, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> Iterator[Part]:
        """The parts of an answer. Raises `ChatError`, also where the stream breaks off. Closing the
        iterator stops the answer.
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
        """Yields once in a while until the server is ready, with the seconds so far. Raises
        `Unavailable` where that takes longer than `seconds`.
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
    """What one event of a stream says. Raises `ChatError` for one that tells of an error."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_message(data) or "the server tells of an error without words")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Part("reasoning", str(thought))
            if text := delta.get("content"):
                yield Part("content", str(text))
        if usage := event.get("usage"):
            yield Part("usage", "", int(usage.get("completion_tokens") or 0))
    except (ValueError, TypeError, AttributeError):
        raise ChatError("the server's stream cannot be read") from None


def _message(content: bytes) -> str:
    """The message of an error in OpenAI's shape, or what else the body says."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
