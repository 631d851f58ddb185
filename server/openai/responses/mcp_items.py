"""Items of tools of MCP servers, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ...core.answers import Answer

McpStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class McpListedTool(Answer, kw_only=True):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None


class McpListToolsItem(Answer, kw_only=True):
    """The tools of a server. `error` is set if the server did not list them."""

    id: str
    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    server_label: str
    tools: Sequence[McpListedTool] = ()
    error: str | None = None


class McpProtocolError(Answer, kw_only=True):
    """The call failed. `code` is that of JSON-RPC, or 0 if the server sent none."""

    type: Literal["mcp_protocol_error"] = "mcp_protocol_error"
    code: int
    message: str


class McpToolError(Answer, kw_only=True):
    """The tool reported a failure."""

    type: Literal["mcp_tool_execution_error"] = "mcp_tool_execution_error"
    content: str


class McpCallItem(Answer, kw_only=True):
    """`arguments` is JSON text."""

    id: str
    type: Literal["mcp_call"] = "mcp_call"
    status: McpStatus = "in_progress"
    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None = None
    output: str | None = None
    error: McpProtocolError | McpToolError | None = None


class McpApprovalRequestItem(Answer, kw_only=True):
    """A call that a client must approve. `arguments` is JSON text."""

    id: str
    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    server_label: str
    name: str
    arguments: str
