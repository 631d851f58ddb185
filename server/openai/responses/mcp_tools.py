"""Tools of the type `mcp`: their wire model, and the functions that they become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ...core.answers import Answer
from ...core.errors import UNION_TAG
from ...core.schemas import WireModel, disagreement
from ..tools import MAX_TOOLS
from .mcp_items import McpListedTool

# Headers that belong to the connection, or that the MCP client sets.
_OWN_HEADERS = re.compile(
    r"host|connection|content-.*|accept.*|transfer-encoding|te|upgrade|expect|mcp-.*"
    r"|last-event-id|proxy-.*",
    re.IGNORECASE,
)
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
_PLAIN, _FILTER = UNION_TAG + "plain", UNION_TAG + "filter"
Names = Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_TOOLS)]


def _form(value: Any) -> str:
    return _FILTER if isinstance(value, dict | WireModel) else _PLAIN


class ToolFilter(WireModel):
    """Tools by their names, or by whether the server says that they only read."""

    tool_names: Names | None = None
    read_only: bool | None = None

    def takes(self, tool: McpListedTool) -> bool:
        """Return whether the filter has the tool."""
        reads = bool((tool.annotations or {}).get("readOnlyHint"))
        return (self.tool_names is None or tool.name in self.tool_names) and self.read_only in (
            None,
            reads,
        )


class ApprovalFilter(WireModel):
    """Which tools need an approval. A tool in neither list needs one."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not (_HEADER.fullmatch(name) and _VALUE.fullmatch(value)):
            raise PydanticCustomError("header", "a header has a name or value that HTTP forbids")
        if _OWN_HEADERS.fullmatch(name):
            raise PydanticCustomError(
                "header", "the header {name} is set by the server itself; leave it out",
                {"name": name},
            )  # fmt: skip
    return headers


class ResponseMcpTool(Answer, kw_only=True):
    """A tool as a response repeats it, without its headers and its token."""

    type: Literal["mcp"] = "mcp"
    server_label: str
    server_url: str | None
    server_description: str | None
    allowed_tools: list[str] | dict[str, Any] | None
    require_approval: str | dict[str, Any]


class McpTool(WireModel):
    """The tools of an MCP server. `headers` and `authorization` are sent to this server only."""

    type: Literal["mcp"]
    server_label: Annotated[str, Field(max_length=64)] = ""
    server_url: Annotated[str | None, Field(max_length=2048)] = None
    server_description: Annotated[str | None, Field(max_length=8192)] = None
    headers: Annotated[dict[str, str], Field(max_length=16), AfterValidator(_checked_headers)] = (
        Field(default_factory=dict)
    )
    authorization: Annotated[str | None, Field(max_length=8192, pattern=r"^[!-~]*$")] = None
    allowed_tools: (
        Annotated[
            Annotated[Names, Tag(_PLAIN)] | Annotated[ToolFilter, Tag(_FILTER)],
            Discriminator(_form),
        ]
        | None
    ) = None
    require_approval: Annotated[
        Annotated[Literal["always", "never"], Tag(_PLAIN)]
        | Annotated[ApprovalFilter, Tag(_FILTER)],
        Discriminator(_form),
    ] = "always"

    @model_validator(mode="after")
    def _has_http(self) -> Self:
        if self.server_url is None:
            return self
        try:
            parts = urlsplit(self.server_url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_good = is_good and parts.username is None and (parts.port is None or parts.port > 0)
        except ValueError:
            is_good = False
        if not is_good:
            raise disagreement(
                "server_url", "server_url must be an http or https URL without a user name"
            )
        return self

    @property
    def host(self) -> tuple[str, int]:
        """Host and port of the server."""
        parts = urlsplit(self.server_url or "")
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def sent_headers(self) -> Mapping[str, str]:
        """The headers of requests to the server."""
        if self.authorization is None:
            return self.headers
        return {**self.headers, "Authorization": f"Bearer {self.authorization}"}

    def allows(self, tool: McpListedTool) -> bool:
        """Return whether the model may know the tool."""
        if isinstance(self.allowed_tools, ToolFilter):
            return self.allowed_tools.takes(tool)
        return self.allowed_tools is None or tool.name in self.allowed_tools

    def needs_approval(self, tool: McpListedTool) -> bool:
        """Return whether a client must approve each call of the tool."""
        if isinstance(self.require_approval, str):
            return self.require_approval == "always"
        always, never = self.require_approval.always, self.require_approval.never
        if always is not None and always.takes(tool):
            return True
        return never is None or not never.takes(tool)

    def as_answer(self) -> ResponseMcpTool:
        """Return the tool as a response repeats it."""
        shown = self.model_dump(
            include={"allowed_tools", "require_approval"}, exclude_none=True, mode="json"
        )
        return ResponseMcpTool(
            server_label=self.server_label,
            server_url=self.server_url,
            server_description=self.server_description,
            allowed_tools=shown.get("allowed_tools"),
            require_approval=shown["require_approval"],
        )


class McpFunction(NamedTuple):
    """One tool of a server, as the model calls it."""

    listed: McpListedTool
    server_label: str
    needs_approval: bool

    @property
    def name(self) -> str:
        return self.listed.name

    def function(self) -> dict[str, Any]:
        """Return the function as chats declare it."""
        return {
            "name": self.listed.name,
            "description": self.listed.description or "",
            "parameters": self.listed.input_schema,
        }


def functions_of(tool: McpTool, listed: Sequence[McpListedTool]) -> list[McpFunction]:
    """Return the functions of the tools that a request allows."""
    return [
        McpFunction(each, tool.server_label, tool.needs_approval(each))
        for each in listed
        if tool.allows(each)
    ]
