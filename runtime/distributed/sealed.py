"""A connection between ranks of different machines: both ends prove that they have the same key
before either reads anything else, and each message that it is the other end's next one.

Nothing is encrypted: whoever can read the network reads prompts. Whoever can write to it can end a
connection, but can neither join, nor make, change, repeat or drop a message without being found
out.

The proofs are HMAC-SHA-256 (RFC 2104) with a key of its own for each connection and direction,
which follows from numbers that both ends have drawn.
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
_LONGEST = 2**28
"""Bytes of a message: more than any prompt has."""
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Seconds until a machine that says nothing is asked whether it is there, and how often."""
MIN_KEY_BYTES = 16


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class OtherKey(ValueError):
    """The other end has another key."""


class Sealed:
    """What `multiprocessing.connection.Connection` is, of which it has what the control channel
    uses. `recv_bytes` raises `EOFError` where the other end has closed it, `OSError` where the
    connection is lost, or is no longer to be trusted.
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
        """How long to wait for the other end; None: for ever."""
        self._socket.settimeout(seconds)

    @property
    def address(self) -> str:
        """This end's."""
        host: str = self._socket.getsockname()[0]
        return host

    @property
    def peer(self) -> str:
        """The other end's."""
        host: str = self._socket.getpeername()[0]
        return host

    def close(self) -> None:
        self._socket.close()


def welcome(connection: socket.socket, key: bytes) -> Sealed:
    """The end that listens. Raises `OtherKey`, and `OSError` or `EOFError` where the other end is
    gone; the caller sets and takes away the time limit of the socket.
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
    """The end that connects; raises as `welcome`."""
    if _read(connection, len(_MAGIC)) != _MAGIC:
        raise OSError("what listens there is no piecework of this version")
    theirs, mine = _read(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(key, b"joins", theirs, mine))
    proof = _read(connection, _PROOF)
    if not hmac.compare_digest(proof, _proof(key, b"listens", theirs, mine)):
        raise OtherKey
    return _sealed(connection, key, theirs + mine, listens=False)


def hung_up(connection: HasFileno, seconds: float | None) -> bool:
    """Whether the other end is gone, or is within `seconds` (None: waits for it). Nothing is read;
    a message that waits does not hide it.
    """
    events = select.poll()
    events.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(events.poll(None if seconds is None else 1000 * seconds))


def read_key(path: str | None) -> bytes:
    """The key of a file, or of PIECEWORK_DIST_KEY; raises `ValueError` where there is none, or one
    that could be guessed.
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
            "--nnodes takes a key that all nodes have: write one into a file (`openssl rand -hex "
            "32 > FILE`), and give it to each as --dist-key-file FILE or PIECEWORK_DIST_KEY"
        )
    if len(key := key.strip()) < MIN_KEY_BYTES:
        raise ValueError(f"{source} holds less than {MIN_KEY_BYTES} bytes; `openssl rand -hex 32`")
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
    """All but the last part have a length that their use fixes, or stand alone."""
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
