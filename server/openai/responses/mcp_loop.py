"""A response whose tools are run by MCP servers between the turns of the model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from ...core.errors import InternalError, InvalidRequest
from ...mcp.results import McpFailure
from ...outgoing.allowed import AllowedServers
from ...serving.collector import Collector
from ...serving.state import Serving
from .chat import begin_within
from .items import Item
from .job import Encoder, Job
from .live import LiveResponse
from .mcp_items import (
    McpApprovalRequestItem,
    McpCallItem,
    McpListedTool,
    McpListToolsItem,
    McpProtocolError,
    McpToolError,
)
from .mcp_tools import McpFunction, McpTool, functions_of
from .requests import ResponsesRequest
from .tools import PromptTool, ToolChoice, mcp_prompt_tools

if TYPE_CHECKING:
    from ...mcp.connection import McpConnection

MAX_SERVERS = 8  # MCP servers of one request.
MAX_CALLS = 32  # Calls of one response. After that, the model must answer without these tools.
_MAX_SECONDS = 600.0  # Time for all turns and calls of one response.


def check_servers(body: ResponsesRequest, allowed: AllowedServers) -> None:
    """Raise `InvalidRequest` for servers that this server may not use or cannot tell apart."""
    labels = [tool.server_label for tool in body.mcp_tools]
    if len(labels) > MAX_SERVERS or len({*labels}) < len(labels):
        raise InvalidRequest(
            f"tools: send at most {MAX_SERVERS} tools of the type mcp, each with its own "
            "server_label.",
            param="tools",
            code="invalid_value",
        )
    for number, tool in enumerate(body.tools):
        if not isinstance(tool, McpTool):
            continue
        if not tool.server_label:
            raise InvalidRequest(
                f"tools[{number}].server_label: this parameter is required.",
                param=f"tools[{number}].server_label",
                code="missing_required_parameter",
            )
        if tool.server_url is None:
            raise InvalidRequest(
                f"tools[{number}].server_url: this server has no connectors; send the URL of the "
                "MCP server.",
                param=f"tools[{number}].server_url",
                code="missing_required_parameter",
            )
        host, port = tool.host
        if not allowed.permits_host(host, port):
            raise InvalidRequest(
                f"tools[{number}].server_url: this server may not use {host}:{port}; start it with "
                f"--mcp-allow {host}:{port}, or leave the tool out.",
                param=f"tools[{number}].server_url",
                code="mcp_server_not_allowed",
            )


class ToolLoop(Job):
    """A response with MCP tools: the model's turns, and the calls between them.

    Args:
        body: The request.
        items: The response's own input.
        context: All items up to the response.
    """

    def __init__(
        self,
        serving: Serving,
        allowed: AllowedServers,
        body: ResponsesRequest,
        items: list[Item],
        context: list[Item],
        answer: LiveResponse,
        encoder: Encoder | None,
    ) -> None:
        from ...mcp.connection import McpConnection

        super().__init__(answer, items, None, encoder, ends_with_client=not body.background)
        self._serving, self._body, self._context = serving, body, context
        self._servers: dict[str, McpConnection] = {
            tool.server_label: McpConnection(allowed, str(tool.server_url), tool.sent_headers)
            for tool in body.mcp_tools
        }
        self._functions: list[PromptTool] = []
        self._calls = 0
        self._most = MAX_CALLS if body.max_tool_calls is None else body.max_tool_calls

    async def run(self) -> None:
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                await self._all_turns()
        except TimeoutError:
            raise InternalError(
                f"A response with MCP tools may take {_MAX_SECONDS:.0f} s; ask for less.",
                code="mcp_timeout",
            ) from None
        finally:
            await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def _all_turns(self) -> None:
        for tool in self._body.mcp_tools:
            await self._list(tool)
        await self._run_approved()
        choice = self._body.tool_choice
        while True:
            await self._turn(choice)
            if not self.answer.output.pending:
                return
            await self._run_pending()
            if any(self._waits_for_client(item) for item in self.answer.output.items):
                self.answer.finish()
                return
            choice = choice.after_a_call()

    async def _turn(self, choice: ToolChoice) -> None:
        body, answer = self._body, self.answer
        changes: dict[str, Any] = {"tool_choice": choice}
        if body.max_output_tokens is not None:
            left = body.max_output_tokens - answer.output_tokens
            changes["max_output_tokens"] = max(1, left)
        functions = self._functions if self._calls < self._most else []
        asked = body.for_turn(functions, **changes)
        items = [*self._context, *msgspec.to_builtins(answer.output.items)]
        conversation = await begin_within(self._serving, asked, items, answer.id, size=answer.size)
        del items
        answer.next_turn(conversation, asked.prompt_tools)
        with Collector(self._serving, conversation.requests) as collector:
            await self.collect(collector)

    async def _list(self, tool: McpTool) -> None:
        """List the tools of a server. If that fails, the model does not get them."""
        item = McpListToolsItem(id="", server_label=tool.server_label)
        try:
            found = await self._servers[tool.server_label].tools()
        except McpFailure as failure:
            item.error = failure.message
        else:
            item.tools = [
                McpListedTool(
                    name=each.name,
                    description=each.description,
                    input_schema=each.input_schema,
                    annotations=(
                        None
                        if each.annotations is None
                        else each.annotations.model_dump(by_alias=True, exclude_none=True)
                    ),
                )
                for each in found
            ]
        known = [*self._body.prompt_tools, *self._functions]
        functions = functions_of(tool, item.tools)
        item.tools = [function.listed for function in functions]
        self._functions += mcp_prompt_tools(functions, known, tool.server_description or "")
        is_known = any(
            each["type"] == "mcp_list_tools" and each.get("server_label") == tool.server_label
            for each in self._context
        )
        if item.error is not None or not is_known:
            self.emit(self.answer.output.add_listed(item))

    async def _run_approved(self) -> None:
        """Run the calls that the input approves. Raise `InvalidRequest` for an unknown one."""
        requests = {
            item["id"]: item for item in self._context if item["type"] == "mcp_approval_request"
        }
        done = {
            str(item.get("approval_request_id"))
            for item in self._context
            if item["type"] == "mcp_call"
        }
        for item in self._context:
            if item["type"] != "mcp_approval_response" or item.get("approve") is not True:
                continue
            name = str(item.get("approval_request_id"))
            if name in done:
                continue
            done.add(name)
            request = requests.get(name)
            if request is None or self._function(request) is None:
                raise InvalidRequest(
                    "input: an mcp_approval_response names no mcp_approval_request of a tool that "
                    "this request has; send the request's item and its tool, too.",
                    param="input",
                    code="unknown_approval_request",
                )
            self.emit(self.answer.output.approved_call(request))
        await self._run_pending()

    def _function(self, request: Item) -> McpFunction | None:
        """Return the function that a request for approval names."""
        for tool in self._functions:
            if (
                isinstance(tool.tool, McpFunction)
                and tool.tool.name == request.get("name")
                and tool.tool.server_label == request.get("server_label")
                and isinstance(request.get("arguments"), str)
            ):
                return tool.tool
        return None

    async def _run_pending(self) -> None:
        for call in list(self.answer.output.pending):
            self._calls += 1
            output, error = await self._call(call)
            self.emit(self.answer.output.end_mcp_call(call, output, error))

    async def _call(
        self, call: McpCallItem
    ) -> tuple[str | None, McpProtocolError | McpToolError | None]:
        """Return the output of a call, or its error."""
        if self._calls > self._most:
            message = f"this response may make {self._most} calls of MCP tools"
            return None, McpProtocolError(code=0, message=message)
        try:
            arguments = pydantic_core.from_json(call.arguments or "{}")
            if not isinstance(arguments, dict):
                raise ValueError
        except ValueError:
            return None, McpProtocolError(code=-32602, message="the arguments are no JSON object")
        try:
            result = await self._servers[call.server_label].call(call.name, arguments)
        except McpFailure as failure:
            return None, McpProtocolError(code=failure.code, message=failure.message)
        if result.is_error:
            return None, McpToolError(content=result.text)
        return result.text or "(no output)", None

    @staticmethod
    def _waits_for_client(item: Any) -> bool:
        """Return whether the client must act on an item before the model goes on."""
        return isinstance(item, McpApprovalRequestItem) or item.type in (
            "function_call",
            "custom_tool_call",
        )
