"""Distributes ranks over machines: the same number on each, in the order of the nodes."""

from __future__ import annotations


def check_nodes(tp_size: int, nnodes: int, node_rank: int, address: str | None) -> None:
    """Raise `ValueError` if the settings of several machines do not fit together."""
    if not 0 <= node_rank < nnodes:
        raise ValueError(
            f"--node-rank must lie between 0 and {nnodes - 1} with --nnodes {nnodes}, got "
            f"{node_rank}"
        )
    if tp_size % nnodes:
        raise ValueError(
            f"--tp-size {tp_size} cannot be spread evenly over --nnodes {nnodes}; take a multiple"
        )
    if nnodes > 1 and address is None:
        raise ValueError(
            "--nnodes takes --dist-init-addr HOST:PORT, node 0's address, the same on all nodes"
        )
    if address is not None:
        split_address(address)


def check_experts(tp_size: int, ep_size: int) -> None:
    """Raise `ValueError` if the ranks cannot form the groups for experts."""
    if tp_size % ep_size:
        raise ValueError(
            f"--ep-size {ep_size} must divide --tp-size {tp_size}, whose ranks hold the experts"
        )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"--dist-init-addr {address}: this is no HOST:PORT such as 10.0.0.1:29500; give node "
            "0's address, the same on all nodes"
        )
    return host, int(port)


def ranks_of(node: int, *, tp_size: int, nnodes: int) -> range:
    """Return the ranks of one node."""
    each = tp_size // nnodes
    return range(node * each, (node + 1) * each)
