"""The servers that a flag names: which hosts and addresses this server may connect to.

allowed = parse_allowed("mcp.example.com,localhost:8000,10.0.0.0/8", "--mcp-allow")
allowed.permits_host("localhost", 8000)
allowed.permits_address("127.0.0.1")
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_ENTRY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_USUAL_PORTS = (80, 443)
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AllowedServers(NamedTuple):
    """What the flag names.

    Attributes:
        hosts: Names and addresses in URLs, each with its port, or with None for 80 and 443.
        networks: Private networks that may be reached.
        flag: The flag, for errors.
        any_host: Whether a URL may name any host. Its addresses are checked all the same.
    """

    hosts: frozenset[tuple[str, int | None]]
    networks: tuple[Network, ...]
    flag: str
    any_host: bool = False

    def permits_host(self, host: str, port: int) -> bool:
        """Return whether a URL may name this host and port."""
        name = host.lower().rstrip(".")
        usual = port in _USUAL_PORTS and (name, None) in self.hosts
        return usual or self.any_host or (name, port) in self.hosts

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


def parse_allowed(text: str, flag: str, *, any_host: bool = False) -> AllowedServers:
    """Parse a list with commas. Raise `ValueError` for an entry that is no host, address or
    network. If `any_host`, the entry * stands for all hosts.
    """
    hosts: set[tuple[str, int | None]] = set()
    networks: list[Network] = []
    entries = [entry for entry in (each.strip() for each in text.split(",")) if entry]
    is_any = any_host and "*" in entries
    for entry in entries:
        if is_any and entry == "*":
            continue
        if "/" in entry:
            networks.append(_network(entry, flag))
            continue
        match = _ENTRY.fullmatch(entry)
        port = None if match is None or match[2] is None else int(match[2])
        if match is None or (port is not None and not 0 < port < 65536):
            raise ValueError(
                f"{flag}: {entry!r} is no host; write files.example.com, localhost:8000, "
                "10.0.0.5 or 10.0.0.0/8, without a scheme"
            )
        host = match[1].strip("[]").lower().rstrip(".")
        hosts.add((host, port))
        if host == "localhost":
            networks += _LOOPBACK
        elif re.fullmatch(r"[0-9.]+|.*:.*", host):
            networks.append(_network(host, flag))
    return AllowedServers(frozenset(hosts), tuple(networks), flag, is_any)


def _network(text: str, flag: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}; write 10.0.0.5 or 10.0.0.0/8") from None
