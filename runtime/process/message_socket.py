"""Messages over a Unix socket, whole and in order, between the web process and an engine process.

A message is the length of its second frame (8 bytes), the length of its first frame (1 byte), and
both frames. There is no thread: a queue with threads would wake up two of them for each message, on
cores that compute.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from typing import Self

_HEAD = struct.Struct("<QB")
_READ = 2**16


class MessageSocket:
    """One end of the connection.

    Sending never blocks. Bytes that the other end does not read yet are kept, and sent by later
    calls of `send`, `poll`, `flush` or `drain`. If the other end is gone, messages are dropped.
    `is_closed` says that the other end is gone or this end is closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._messages: deque[list[bytes]] = deque()
        self._may_have_more = False
        self._poll = select.poll()
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self.is_closed = False

    @classmethod
    def connect(cls, path: str) -> Self:
        """Connect to the listener at a path. Raise `OSError` if there is none."""
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return cls(connected)

    @property
    def has_more(self) -> bool:
        """Whether there may be another message that does not make this end readable."""
        return bool(self._messages) or self._may_have_more

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: list[bytes]) -> bool:
        """Send a message. Return whether all bytes have been sent."""
        name, content = frames
        if not self.is_closed:
            head = _HEAD.pack(len(content), len(name))
            self._unsent.append(memoryview(b"".join((head, name, content))))
        return self.flush()

    def flush(self) -> bool:
        """Send kept bytes as far as the socket takes them. Return whether all have been sent."""
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self._socket.send(part)
                if sent == len(part):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = part[sent:]
        except BlockingIOError:
            return False
        except OSError:
            self._disconnect()
        return True

    def drain(self, milliseconds: int) -> None:
        """Send kept bytes until all are sent, or the other end reads nothing for this time."""
        while not self.flush():
            self._poll.register(self._socket, select.POLLOUT)
            if not self._poll.poll(milliseconds):
                return

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if no whole message has arrived."""
        while not self._messages and self._read():
            pass
        return self._messages.popleft() if self._messages else None

    def poll(self, milliseconds: int) -> bool:
        """Whether a message has arrived, or arrives within this time."""
        self.flush()
        # A poll without result is cheaper than a read without result.
        if not self._messages and self._socket.fileno() >= 0 and self._arrivals.poll(0):
            while not self._messages and self._read():
                pass
        if milliseconds and not self._messages:
            deadline = time.monotonic() + milliseconds / 1000
            while not self._messages and (left := deadline - time.monotonic()) > 0:
                if self.is_closed:
                    time.sleep(left)
                    break
                self._poll.register(
                    self._socket, select.POLLIN if self.flush() else select.POLLIN | select.POLLOUT
                )
                self._poll.poll(left * 1000)
                self._read()
        return bool(self._messages)

    def close(self, *, linger: float = 0.0) -> None:
        """Close this end. Wait up to `linger` seconds until kept bytes are sent."""
        if not self.flush() and linger:
            self._socket.settimeout(linger)
            self.flush()
        self._disconnect()
        self._socket.close()

    def _read(self) -> bool:
        """Read up to `_READ` bytes. Return whether there may be more."""
        self._may_have_more = False
        try:
            part = self._socket.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        if not part:
            self._disconnect()
            return False
        self._received += part
        begin, size = 0, len(self._received)
        while size - begin >= _HEAD.size:
            content, name = _HEAD.unpack_from(self._received, begin)
            middle = begin + _HEAD.size + name
            if size < middle + content:
                break
            self._messages.append(
                [
                    bytes(self._received[begin + _HEAD.size : middle]),
                    bytes(self._received[middle : middle + content]),
                ]
            )
            begin = middle + content
        del self._received[:begin]
        self._may_have_more = len(part) == _READ
        return self._may_have_more

    def _disconnect(self) -> None:
        self.is_closed = True
        self._unsent.clear()
