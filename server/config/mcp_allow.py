"""The servers of `--mcp-allow`: which hosts and addresses responses may reach.

allowed = parse_mcp_allow("mcp.example.com,localhost:8000,10.0.0.0/8")
allowed.permits_host("localhost", 8000)
allowed.permits_address("127.0.0.1")
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from ...runtime.config.options import option

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_ENTRY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_USUAL_PORTS = (80, 443)
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AllowedServers(NamedTuple):
    """What `--mcp-allow` names.

    Attributes:
        hosts: Names and addresses in URLs, each with its port, or with None for 80 and 443.
        networks: Private networks that may be reached.
    """

    hosts: frozenset[tuple[str, int | None]]
    networks: tuple[Network, ...]

    def permits_host(self, host: str, port: int) -> bool:
        """Return whether a URL may name this host and port."""
        name = host.lower().rstrip(".")
        usual = port in _USUAL_PORTS and (name, None) in self.hosts
        return usual or (name, port) in self.hosts

    def permits_address(self, text: str) -> bool:
        """Return whether a connection may be made to this address.

        Public addresses may be reached. Others must be in `networks`.
        """
        address = _plain(ipaddress.ip_address(text.partition("%")[0]))
        if any(address in network for network in self.networks):
            return True
        return address.is_global and not address.is_multicast and address not in _NAT64


def _plain(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address.sixtofour or address
    return address


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
    hosts: set[tuple[str, int | None]] = set()
    networks: list[Network] = []
    for entry in filter(None, (each.strip() for each in text.split(","))):
        if "/" in entry:
            networks.append(_network(entry))
            continue
        match = _ENTRY.fullmatch(entry)
        port = None if match is None or match[2] is None else int(match[2])
        if match is None or (port is not None and not 0 < port < 65536):
            raise ValueError(
                f"--mcp-allow: {entry!r} is no host; write mcp.example.com, localhost:8000, "
                "10.0.0.5 or 10.0.0.0/8, without a scheme"
            )
        host = match[1].strip("[]").lower().rstrip(".")
        hosts.add((host, port))
        if host == "localhost":
            networks += _LOOPBACK
        elif re.fullmatch(r"[0-9.]+|.*:.*", host):
            networks.append(_network(host))
    return AllowedServers(frozenset(hosts), tuple(networks))


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"--mcp-allow: {error}; write 10.0.0.5 or 10.0.0.0/8") from None
