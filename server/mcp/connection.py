"""A connection to one MCP server: its tools, and calls of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, Tool

from ..outgoing.allowed import AllowedServers
from ..outgoing.pinned import Refused, checked_address, http_client
from .results import McpFailure, ToolResult

logger = logging.getLogger(__name__)

LIST_SECONDS = 20.0  # Time for connecting and for listing the tools.
CALL_SECONDS = 60.0  # Time for one call.
_MAX_PAGES = 8  # Pages of a list of tools.
_MAX_TOOLS = 128
MAX_BYTES = 4 * 2**20  # Bytes that one connection may read.
_MAX_MESSAGE = 4096  # Characters of a server's error message.
_CLOSE_SECONDS = 2.0
_Work = Callable[[Client], Awaitable[Any]]


class McpConnection:
    """A connection, which is made by the first use. `tools` and `call` raise `McpFailure`.

    The SDK's client runs in a task of its own, so that its failure cancels nothing else. A use that
    takes too long ends the connection. Call `close` at the end.
    """

    def __init__(self, allowed: AllowedServers, url: str, headers: Mapping[str, str]) -> None:
        self._allowed, self._url, self._headers = allowed, url, headers
        self._work: asyncio.Queue[tuple[_Work, asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def tools(self) -> list[Tool]:
        """Return the tools of the server."""
        found: list[Tool] = await self._use(_tools, "list of tools", LIST_SECONDS)
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool and return its text."""

        async def work(client: Client) -> ToolResult:
            result = await client.call_tool(name, arguments)
            return ToolResult(_text(result), bool(result.is_error))

        found: ToolResult = await self._use(work, f"call of {name[:64]!r}", CALL_SECONDS)
        return found

    async def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)

    async def _use(self, work: _Work, what: str, seconds: float) -> Any:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.put_nowait((work, done))
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait([done, self._task], timeout=seconds, return_when=first)
        with _failures(what):
            if done.done():
                return done.result()
            if not self._task.done():
                self._task.cancel()
                raise TimeoutError
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error
            raise McpFailure("the connection has ended")

    async def _run(self) -> None:
        parsed = httpx2.URL(self._url)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        address = await checked_address(self._allowed, parsed.host, port)
        async with http_client(
            self._url, address, self._headers, CALL_SECONDS, most=MAX_BYTES
        ) as http:
            transport = streamable_http_client(self._url, http_client=http)
            async with Client(transport, cache=None) as client:
                while True:
                    work, done = await self._work.get()
                    try:
                        result = await work(client)
                    except Exception as error:
                        if not done.done():
                            done.set_exception(error)
                    else:
                        if not done.done():
                            done.set_result(result)


async def _tools(client: Client) -> list[Tool]:
    found: list[Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None or len(found) > _MAX_TOOLS:
            break
    if len(found) > _MAX_TOOLS:
        raise McpFailure(f"the server has more than {_MAX_TOOLS} tools")
    return found


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Raise `McpFailure` for every error in the block."""
    try:
        yield
    except McpFailure:
        raise
    except TimeoutError:
        raise McpFailure(f"the {what} took too long") from None
    except MCPError as error:
        raise McpFailure(error.error.message[:_MAX_MESSAGE], error.error.code) from None
    except Exception as error:
        # The SDK reports errors of its tasks as groups.
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, Refused):
            raise McpFailure(str(cause)) from None
        logger.info("MCP: the %s failed: %s: %s", what, type(cause).__name__, cause)
        raise McpFailure(f"the {what} failed: {type(cause).__name__}") from None


def _text(result: CallToolResult) -> str:
    """Return the text of a result. Parts without text are replaced by a note."""
    parts = [
        part.text if part.type == "text" else f"({part.type}: this model reads only text)"
        for part in result.content
    ]
    return "\n".join(parts)
