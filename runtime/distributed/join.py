"""Joins the ranks of other machines to rank 0.

They connect to rank 0 and prove that they have the key. Rank 0 checks that all machines have the
same versions and the same model before any rank loads it. A rank sends `Hello` as JSON. Rank 0
answers with the rank's job, or with the reason why the rank cannot join, which both ends then
report.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import psutil

from ...compilation.piece_store import source_hash
from ...version import __version__
from ..config.engine import EngineConfig
from ..config.nodes import split_address
from ..files.resolve import resolve_model_path
from ..loader.fingerprint import fingerprint
from .sealed import OtherKey, Sealed, hung_up, knock, welcome

logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
_MAX_HANDSHAKES = 32  # At the same time. Further connections wait.
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Hello:
    """The first message of a rank that joins.

    `same` holds what must be equal on all nodes, by the names that errors use.
    """

    node: int
    rank: int
    same: Mapping[str, str]


def hello(config: EngineConfig, rank: int) -> Hello:
    """Return the `Hello` of this rank. Raise `ValueError` if its model cannot be read."""
    path = resolve_model_path(config.model_path)
    # Two commits may have the same version.
    sources = source_hash("kernels", "compilation", "runtime")[:12]
    same = {
        "version of piecework": f"{__version__} (sources {sources})",
        "version of torch": version("torch"),
        "model": fingerprint(path, weights=config.load_format != "dummy"),
        "--tp-size": str(config.tp_size),
        "--ep-size": str(config.ep_size),
        "--nnodes": str(config.nnodes),
    }
    return Hello(config.node_rank, rank, same)


def listen(address: str) -> socket.socket:
    """Open the port where ranks join.

    Raise `ValueError` if the port is in use or the address is not one of this machine.
    """
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (
            "the port is in use; choose another one on all nodes, or stop what listens there"
            if error.errno == errno.EADDRINUSE
            else error.strerror or str(error)
        )
        raise ValueError(f"cannot listen on --dist-init-addr {address}: {reason}") from None


def await_ranks(
    listener: socket.socket, key: bytes, here: Hello, nodes: Mapping[int, int], seconds: float
) -> list[Sealed]:
    """Wait until all ranks of `nodes` (rank to node) have joined. Return their connections in
    order.

    `here` is the `Hello` of rank 0. Connections with another key are ignored. If a rank is missing
    after `seconds`, or differs from rank 0, refuse the ranks that have joined and raise
    `ValueError` that names the rank.
    """
    joined: dict[int, Sealed] = {}
    entrance = _Entrance(listener, key)
    deadline = time.monotonic() + seconds
    try:
        # A rank that has joined and disconnected must join again.
        while len(joined := _connected(joined)) < len(nodes):
            try:
                connection, hello = entrance.next(deadline - time.monotonic())
            except queue.Empty:
                raise ValueError(
                    _missing(nodes, _connected(joined), listener, seconds, entrance.strangers)
                ) from None
            if reason := _difference(here, hello):
                _refuse(connection, reason)
                raise ValueError(reason)
            if nodes.get(hello.rank) != hello.node or hello.rank in _connected(joined):
                reason = f"two nodes have --node-rank {hello.node}; give each its own"
                _refuse(connection, reason)
                raise ValueError(reason)
            joined[hello.rank] = connection
    except ValueError as error:
        for connection in joined.values():
            _refuse(connection, str(error))
        raise
    finally:
        entrance.close()
    return [joined[rank] for rank in sorted(joined)]


def _connected(joined: Mapping[int, Sealed]) -> dict[int, Sealed]:
    return {rank: end for rank, end in joined.items() if not hung_up(end, 0.0)}


def accept(connection: Sealed, job: Mapping[str, Any]) -> None:
    """Send its job to a rank that has joined. The caller uses the connection from now on."""
    connection.send_bytes(json.dumps({"job": job}).encode())


def join(address: str, key: bytes, hello: Hello, seconds: float) -> tuple[Sealed, dict[str, Any]]:
    """Connect to rank 0, retrying for `seconds`. Return the connection and the job of this rank.

    Raise `ValueError` with the reason if this rank cannot join, or `TimeoutError` if rank 0 cannot
    be reached.
    """
    deadline = time.monotonic() + seconds
    reason: object = None
    while time.monotonic() < deadline:
        try:
            return _join_once(address, key, hello, deadline)
        except OtherKey:
            raise ValueError(
                f"node 0, at --dist-init-addr {address}, has another key: give all nodes the same "
                "--dist-key-file or PIECEWORK_DIST_KEY"
            ) from None
        except (OSError, EOFError) as error:
            reason = error if str(error) else reason
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(
        f"node 0 was not there within {seconds:g} s (--dist-timeout): no server accepts ranks at "
        f"--dist-init-addr {address} ({reason}); start the server with --node-rank 0 there"
    )


def _join_once(
    address: str, key: bytes, hello: Hello, deadline: float
) -> tuple[Sealed, dict[str, Any]]:
    plain = socket.create_connection(split_address(address), timeout=_HANDSHAKE_SECONDS)
    try:
        connection = knock(plain, key)
        connection.send_bytes(json.dumps(asdict(hello)).encode())
        # Rank 0 answers when all ranks have joined.
        connection.settimeout(max(1.0, deadline - time.monotonic()))
        answer = json.loads(connection.recv_bytes())
    except BaseException:
        plain.close()
        raise
    if "refused" in answer:
        plain.close()
        raise ValueError(answer["refused"])
    connection.settimeout(None)
    return connection, answer["job"]


class _Entrance:
    """Accepts connections, each handshake in its own thread, so that a silent connection does not
    block others. `strangers` counts the connections with another key.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._arrived: queue.Queue[tuple[Sealed, Hello]] = queue.Queue()
        self._room = threading.Semaphore(_MAX_HANDSHAKES)
        self._closed = False
        self.strangers = 0
        threading.Thread(target=self._accept, name="join", daemon=True).start()

    def next(self, seconds: float) -> tuple[Sealed, Hello]:
        """Wait for the next rank. Raise `queue.Empty` if there is none within `seconds`."""
        return self._arrived.get(timeout=max(0.0, seconds))

    def close(self) -> None:
        """Accept no more connections.

        Shutting the socket down wakes the thread that accepts, which closing alone does not.
        """
        self._closed = True
        with contextlib.suppress(OSError):  # macOS: the socket is not connected.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            self._room.acquire()
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(plain,), name="join", daemon=True).start()

    def _greet(self, plain: socket.socket) -> None:
        # The timer limits the whole handshake. The socket's timeout starts anew with each byte.
        late = threading.Timer(_HANDSHAKE_SECONDS, _hang_up, [plain])
        late.daemon = True
        late.start()
        try:
            plain.settimeout(_HANDSHAKE_SECONDS)
            connection = welcome(plain, self._key)
            fields = json.loads(connection.recv_bytes())
            late.cancel()
            late.join()
            if hung_up(connection, 0.0):
                raise EOFError
            connection.settimeout(None)
            self._arrived.put((connection, Hello(**fields)))
        except OtherKey:
            plain.close()
            self.strangers += 1
            if self.strangers == 1:
                logger.warning("a connection to --dist-init-addr had another key")
        except (OSError, EOFError, ValueError, TypeError):
            plain.close()
        finally:
            late.cancel()
            self._room.release()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _refuse(connection: Sealed, reason: str) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps({"refused": reason}).encode())
    connection.close()


def _difference(here: Hello, hello: Hello) -> str | None:
    for name in here.same.keys() | hello.same.keys():
        mine, theirs = (str(each.same.get(name, "none")) for each in (here, hello))
        if mine != theirs:
            return (
                f"node {hello.node} has another {name} than node 0 ({theirs}, and {mine} there): "
                "all nodes need the same"
            )
    return None


def _missing(
    nodes: Mapping[int, int],
    joined: Collection[int],
    listener: socket.socket,
    seconds: float,
    strangers: int,
) -> str:
    lacking: dict[int, list[int]] = {}
    for rank, node in nodes.items():
        if rank not in joined:
            lacking.setdefault(node, []).append(rank)
    host, port = listener.getsockname()[:2]
    missing = ", ".join(
        f"node {node} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for node, ranks in lacking.items()
    )
    wrong = f"; {strangers} connections had another key" if strangers else ""
    return (
        f"{missing} did not join at {host}:{port} within {seconds:g} s (--dist-timeout){wrong}: "
        "start the same command there with its --node-rank, and check that it can reach this "
        "address"
    )


def keep_to_interface(address: str) -> None:
    """Have the collective libraries use the interface of this address, unless the user has chosen
    one.

    By default they use the interface of the machine's name.
    """
    names = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(found.address.partition("%")[0] == address for found in addresses)
    )
    if (name := next(names, None)) is not None:
        for library in ("GLOO", "NCCL", "HCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
