"""How the ranks of other machines join: they connect to rank 0, which knows them by the key, and it
makes sure that all have the same versions and the same model before any of them loads it.

What is said is JSON: `Hello` from the rank, and back either what it is to do or why it cannot be.
Both ends say the same line where it cannot be.
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

from ... import __version__
from ...compilation.piece_store import source_hash
from ..config.engine import EngineConfig
from ..config.nodes import split_address
from ..files.resolve import resolve_model_path
from ..loader.fingerprint import fingerprint
from .sealed import OtherKey, Sealed, hung_up, knock, welcome

logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
_MOST_AT_ONCE = 32
"""Connections whose handshake is under way; who opens more waits."""
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Hello:
    """Who joins, and what must be the same on all nodes, each under the name that an error calls it
    by.
    """

    node: int
    rank: int
    same: Mapping[str, str]


def hello(config: EngineConfig, rank: int) -> Hello:
    """This rank's. Raises `ValueError` where its model cannot be read."""
    path = resolve_model_path(config.model_path)
    # Two commits may have one version.
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
    """Where ranks join. Raises `ValueError` where the port is taken or the address is not this
    machine's.
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
    """The connections of `nodes`' ranks (rank to node), in order, once all have joined.

    `here`: rank 0's own. Who has another key is not listened to. Raises `ValueError` that names who
    is missing after `seconds`, or differs; those that have joined are told.
    """
    joined: dict[int, Sealed] = {}
    door = _Door(listener, key)
    deadline = time.monotonic() + seconds
    try:
        # Who has joined and gone again is waited for again.
        while len(joined := _there(joined)) < len(nodes):
            try:
                connection, hello = door.next(deadline - time.monotonic())
            except queue.Empty:
                raise ValueError(
                    _missing(nodes, _there(joined), listener, seconds, door.strangers)
                ) from None
            if reason := _difference(here, hello):
                _refuse(connection, reason)
                raise ValueError(reason)
            if nodes.get(hello.rank) != hello.node or hello.rank in _there(joined):
                reason = f"two nodes have --node-rank {hello.node}; give each its own"
                _refuse(connection, reason)
                raise ValueError(reason)
            joined[hello.rank] = connection
    except ValueError as error:
        for connection in joined.values():
            _refuse(connection, str(error))
        raise
    finally:
        door.close()
    return [joined[rank] for rank in sorted(joined)]


def _there(joined: Mapping[int, Sealed]) -> dict[int, Sealed]:
    return {rank: each for rank, each in joined.items() if not hung_up(each, 0.0)}


def accept(connection: Sealed, job: Mapping[str, Any]) -> None:
    """Tell a rank that has joined what to do. What is sent from here on is the caller's."""
    connection.send_bytes(json.dumps({"job": job}).encode())


def join(address: str, key: bytes, hello: Hello, seconds: float) -> tuple[Sealed, dict[str, Any]]:
    """The connection to rank 0, and what to do. Tries for `seconds` to reach it.

    Raises `ValueError` with why this rank cannot join, and `TimeoutError` where nobody was there.
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
        f"node 0 was not there within {seconds:g} s (--dist-timeout): nobody takes ranks at "
        f"--dist-init-addr {address} ({reason}); start the server with --node-rank 0 there"
    )


def _join_once(
    address: str, key: bytes, hello: Hello, deadline: float
) -> tuple[Sealed, dict[str, Any]]:
    plain = socket.create_connection(split_address(address), timeout=_HANDSHAKE_SECONDS)
    try:
        connection = knock(plain, key)
        connection.send_bytes(json.dumps(asdict(hello)).encode())
        # It answers once all have joined.
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


class _Door:
    """Takes connections in threads, so that one that says nothing keeps nobody out. `strangers`:
    how many had another key.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._arrived: queue.Queue[tuple[Sealed, Hello]] = queue.Queue()
        self._room = threading.Semaphore(_MOST_AT_ONCE)
        self._closed = False
        self.strangers = 0
        threading.Thread(target=self._accept, name="join", daemon=True).start()

    def next(self, seconds: float) -> tuple[Sealed, Hello]:
        """Who comes next. Raises `queue.Empty`."""
        return self._arrived.get(timeout=max(0.0, seconds))

    def close(self) -> None:
        """Take nobody any more. Wakes the thread that waits for a connection, which `close` alone
        does not.
        """
        self._closed = True
        with contextlib.suppress(OSError):  # macOS: it is not connected.
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
        # A socket's own limit is one for each byte that comes.
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
    who = ", ".join(
        f"node {node} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for node, ranks in lacking.items()
    )
    wrong = f"; {strangers} connections had another key" if strangers else ""
    return (
        f"{who} did not join at {host}:{port} within {seconds:g} s (--dist-timeout){wrong}: start "
        "the same command there with its --node-rank, and see that it can reach this address"
    )


def _interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    names = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address.partition("%")[0] == address for each in addresses)
    )
    return next(names, None)


def keep_to_interface(address: str) -> None:
    """Have the libraries of collectives talk over the interface of this address of ours, where the
    user has not chosen one: by themselves they take that of the machine's name.
    """
    if (name := _interface_of(address)) is not None:
        for library in ("GLOO", "NCCL", "HCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
