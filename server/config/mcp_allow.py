"""The servers of `--mcp-allow`: which MCP servers responses may reach."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ...runtime.config.options import option
from ..outgoing.allowed import AllowedServers, parse_allowed


@dataclass(frozen=True, kw_only=True)
class McpConfig:
    """Which MCP servers a server may reach. A part of `ServerConfig`."""

    mcp_allow: str = option(
        "",
        "MCP servers that responses may use as tools (mcp.example.com,localhost:8000), and private "
        "networks (10.0.0.0/8) in which they may be; needs the extra mcp; default: none",
        group="server",
        metavar="LIST",
        items=r"[^-].*",
    )

    def check_mcp(self) -> None:
        """Raise `ValueError` if the flag is wrong, or needs a package that is missing."""
        if parse_mcp_allow(self.mcp_allow).hosts and find_spec("mcp") is None:
            raise ValueError(
                "--mcp-allow needs the package mcp: pip install 'piecework[mcp]', or leave it out"
            )


def parse_mcp_allow(text: str) -> AllowedServers:
    """Parse the flag. Raise `ValueError` for an entry that is no host, address or network."""
    return parse_allowed(text, "--mcp-allow")
