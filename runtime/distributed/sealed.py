"""An authenticated connection between ranks of different machines.

Both ends first prove that they have the same key. Then each message carries a proof that it is the
next message of the other end.

Nothing is encrypted: people who can read the network can read prompts. People who can write to it
can end a connection. They cannot join, and if they forge, change, repeat or drop a message, the
other end notices.

The proofs are HMAC-SHA-256 (RFC 2104). Each connection and direction has its own key, derived from
random numbers of both ends.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import stat
import struct
import sys
from typing import Protocol

logger = logging.getLogger(__name__)

_MAGIC = b"piecework ranks1"
_NONCE = 32
_PROOF = 32
_REFUSED = bytes(_PROOF)
_LENGTH = struct.Struct(">I")
_LONGEST = 2**28  # Limit of a message in bytes. Prompts are shorter.
# A silent machine is probed after 20 s, every 10 s, three times.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
MIN_KEY_BYTES = 16


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class OtherKey(ValueError):
    """The other end has another key."""


class Sealed:
    """A connection with those methods of `multiprocessing.connection.Connection` that the control
    channel uses.

    `recv_bytes` raises `EOFError` if the other end has closed the connection. It raises `OSError`
    if the connection is lost, or if a message fails its check.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._socket, self._sending, self._receiving = connection, sending, receiving
        self._sent = self._received = 0

    def send_bytes(self, message: bytes) -> None:
        proof = _proof(self._sending, self._sent.to_bytes(8), message)
        self._sent += 1
        self._socket.sendall(b"".join((_LENGTH.pack(len(message)), message, proof)))

    def recv_bytes(self) -> bytes:
        (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
        if length > _LONGEST:
            raise OSError("a message of this length was never sent")
        message = _read(self._socket, length)
        expected = _proof(self._receiving, self._received.to_bytes(8), message)
        if not hmac.compare_digest(_read(self._socket, _PROOF), expected):
            raise OSError("a message that the other end did not send")
        self._received += 1
        return message

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of sends and receives. None means no timeout."""
        self._socket.settimeout(seconds)

    @property
    def address(self) -> str:
        """The address of this end."""
        host: str = self._socket.getsockname()[0]
        return host

    @property
    def peer(self) -> str:
        """The address of the other end."""
        host: str = self._socket.getpeername()[0]
        return host

    def close(self) -> None:
        self._socket.close()


def welcome(connection: socket.socket, key: bytes) -> Sealed:
    """Do the handshake of the end that listens.

    Raise `OtherKey`, or `OSError` or `EOFError` if the other end is gone. The caller sets and
    removes the timeout of the socket.
    """
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(_MAGIC + mine)
    theirs, proof = _read(connection, _NONCE), _read(connection, _PROOF)
    if not hmac.compare_digest(proof, _proof(key, b"joins", mine, theirs)):
        connection.sendall(_REFUSED)
        raise OtherKey
    connection.sendall(_proof(key, b"listens", mine, theirs))
    return _sealed(connection, key, mine + theirs, listens=True)


def knock(connection: socket.socket, key: bytes) -> Sealed:
    """Do the handshake of the end that connects. Raise as `welcome`."""
    if _read(connection, len(_MAGIC)) != _MAGIC:
        raise OSError("the listener is not a piecework server of this version")
    theirs, mine = _read(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(key, b"joins", theirs, mine))
    proof = _read(connection, _PROOF)
    if not hmac.compare_digest(proof, _proof(key, b"listens", theirs, mine)):
        raise OtherKey
    return _sealed(connection, key, theirs + mine, listens=False)


def hung_up(connection: HasFileno, seconds: float | None) -> bool:
    """Wait up to `seconds` (None: without limit) until the other end is gone. Return whether it is.

    Unread messages stay, and do not hide the end.
    """
    events = select.poll()
    events.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(events.poll(None if seconds is None else 1000 * seconds))


def read_key(path: str | None) -> bytes:
    """Return the key of a file or of PIECEWORK_DIST_KEY.

    Raise `ValueError` if there is no key, or if it is too short.
    """
    source = f"--dist-key-file {path}" if path else "PIECEWORK_DIST_KEY"
    if path:
        try:
            with open(path, "rb") as file:
                mode, key = os.fstat(file.fileno()).st_mode, file.read(2**16)
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            logger.warning("%s can be read by every user of this machine; chmod o-r it", source)
    elif (found := os.environ.get("PIECEWORK_DIST_KEY")) is not None:
        key = found.encode(errors="surrogateescape")
    else:
        raise ValueError(
            "--nnodes needs the same key on all nodes: write one into a file (`openssl rand -hex "
            "32 > FILE`), and pass it to each node as --dist-key-file FILE or PIECEWORK_DIST_KEY"
        )
    if len(key := key.strip()) < MIN_KEY_BYTES:
        raise ValueError(
            f"{source} holds less than {MIN_KEY_BYTES} bytes; make one with `openssl rand -hex 32`"
        )
    return key


def _sealed(connection: socket.socket, key: bytes, drawn: bytes, *, listens: bool) -> Sealed:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for name, value in _KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    down, up = (_proof(key, direction, drawn) for direction in (b"down", b"up"))
    return Sealed(connection, down, up) if listens else Sealed(connection, up, down)


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the joined parts. Parts before the last one must have fixed lengths."""
    return hmac.digest(key, b"".join(parts), "sha256")


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view, had = memoryview(buffer), 0
    while had < length:
        got = connection.recv_into(view[had:])
        if got == 0:
            raise EOFError
        had += got
    return bytes(buffer)
