"""What every attack uses: the server's address, an HTTP client, raw connections, and a count of
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from ...server.serving.state import Kind

BODY_BYTES = 4 * 2**20  # Piecework's limit of a body.
NO_ANSWER = "closed"
TIMED_OUT = "no answer in time"


class Attack(NamedTuple):
    """An attack. `about` describes it in a few words."""

    name: str
    about: str
    run: Callable[[Arena], Awaitable[None]]


class Connection(NamedTuple):
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> bool:
        """Send data. Return false if the server has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
            return not self.writer.is_closing()
        except OSError:
            return False

    async def status(self) -> str:
        """Read until the server closes the connection. Return the status of the first answer."""
        said = b""
        with contextlib.suppress(OSError):
            while part := await self.reader.read(65536):
                said = said or part[:20]
        return said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else NO_ANSWER


@dataclass(slots=True)
class Arena:
    """One server, the number of its answers by status, and the problems that it had."""

    base_url: str
    model: str | None
    api_key: str | None
    timeout: float
    kind: Kind = "text"
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(self.timeout)
        ) as session:
            self.session = session
            yield

    async def post(self, path: str, body: Any) -> tuple[str, bytes]:
        return await self.ask(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode()
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        label: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[str, bytes]:
        """Send a request and count its answer. Return its status, or why there is none, and its
        body.

        `label` precedes the description of a wrong answer.
        """
        assert self.session is not None
        content = b""
        try:
            async with self.session.request(
                method, self.base_url + path, data=body, headers=headers
            ) as answer:
                content = await answer.read()
                status = str(answer.status)
        except TimeoutError:
            status = TIMED_OUT
        except (aiohttp.ClientError, OSError):
            status = NO_ANSWER
        if status in ("503", "529"):
            status = f"503 {_error_code(content)}"
        self.answers[status] += 1
        refused = status == "501" or (status.startswith("503") and "engine" not in status)
        if status.startswith("5") and not refused:
            self.problems.append(
                f"{label}{status} to {method} {path} with {body!r:.2000}: {content[:300]!r}"
            )
        return status, content

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        return parts.hostname or "", parts.port or 80

    async def connect(self) -> Connection | None:
        """Open a connection. If the server has no room for it, count that and return None."""
        try:
            return Connection(*await asyncio.open_connection(*self.address))
        except OSError:
            self.answers["not connected"] += 1
            return None

    def head(self, method: str = "POST", path: str = "/v1/completions", *lines: str) -> bytes:
        """Return the beginning of a request's head, without the empty line."""
        key = [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "".join(
            f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: attack", *key, *lines)
        ).encode()

    async def each(self, count: int, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Run `work` on `count` connections at once, each until the server closes it, and count the
        answers.
        """
        await together(self._until_closed(work) for _ in range(count))

    async def _until_closed(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        connection = await self.connect()
        if connection is None:
            return
        working = asyncio.ensure_future(work(connection))
        try:
            self.answers[await connection.status()] += 1
        except asyncio.CancelledError:
            self.answers["still open"] += 1
            raise
        finally:
            working.cancel()
            connection.writer.transport.abort()


async def together(work: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*work)


def _error_code(content: bytes) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(content)["error"]
        # Anthropic's errors have no code, but another type if the engine fails.
        return str(error.get("code") or error["type"].replace("api_error", "engine_unavailable"))
    return "?"
