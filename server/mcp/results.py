"""What uses of MCP servers give. This file does not need the package `mcp`."""

from __future__ import annotations

from typing import NamedTuple


class McpFailure(Exception):
    """A server that failed. `code` is a JSON-RPC code if the server sent one, or 0."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class ToolResult(NamedTuple):
    """What a tool returned. `is_error`: the tool itself reports a failure."""

    text: str
    is_error: bool
