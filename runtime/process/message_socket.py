"""Messages over a Unix socket, whole and in order, between the web process and an engine process.

Of two frames each, before them their lengths: 8 bytes for the second, 1 for the first. Straight
from one process to the other: a queue with threads of its own would wake up two more for each
message, on cores that compute.
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
    """One end. Sending never blocks: what the other end does not take yet is kept, and leaves with
    later calls of `send`, `poll`, `flush` or `drain`. What is sent to an end that is gone is
    dropped.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._unsent: deque[memoryview] = deque()
        self._begun = bytearray()
        self._messages: deque[list[bytes]] = deque()
        self._met_limit = False
        self._poll = select.poll()
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self.is_closed = False
        """The other end is gone, or this one is closed."""

    @classmethod
    def connect(cls, path: str) -> Self:
        """To who listens at a path. Raises `OSError`."""
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return cls(connected)

    @property
    def has_more(self) -> bool:
        """Whether there may be another message, as far as what was read last tells: if not, what
        comes makes this end readable.
        """
        return bool(self._messages) or self._met_limit

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: list[bytes]) -> bool:
        """Returns whether all has left."""
        name, content = frames
        if not self.is_closed:
            head = _HEAD.pack(len(content), len(name))
            self._unsent.append(memoryview(b"".join((head, name, content))))
        return self.flush()

    def flush(self) -> bool:
        """Send what is kept, as far as the other end takes it; returns whether all has left."""
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
            self._is_gone()
        return True

    def drain(self, milliseconds: int) -> None:
        """Send what is kept, for as long as the other end takes more of it within so long."""
        while not self.flush():
            self._poll.register(self._socket, select.POLLOUT)
            if not self._poll.poll(milliseconds):
                return

    def receive(self) -> list[bytes] | None:
        """The frames of a message that is there; None: no whole one is."""
        while not self._messages and self._read():
            pass
        return self._messages.popleft() if self._messages else None

    def poll(self, milliseconds: int) -> bool:
        """Whether a message is there, or comes within so long."""
        self.flush()
        # To be told that nothing is there takes less than to find that nothing can be read.
        if not self._messages and self._socket.fileno() >= 0 and self._arrivals.poll(0):
            while not self._messages and self._read():
                pass
        if milliseconds and not self._messages:
            self._wait(time.monotonic() + milliseconds / 1000)
        return bool(self._messages)

    def close(self, *, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds for what is kept to leave."""
        if not self.flush() and linger:
            self._socket.settimeout(linger)
            self.flush()
        self._is_gone()
        self._socket.close()

    def _wait(self, deadline: float) -> None:
        while not self._messages and (left := deadline - time.monotonic()) > 0:
            if self.is_closed:
                time.sleep(left)
                return
            self._poll.register(
                self._socket, select.POLLIN if self.flush() else select.POLLIN | select.POLLOUT
            )
            self._poll.poll(left * 1000)
            self._read()

    def _read(self) -> bool:
        """What is there, to a limit; returns whether it met that."""
        self._met_limit = False
        try:
            part = self._socket.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        if not part:
            self._is_gone()
            return False
        self._begun += part
        begin, size = 0, len(self._begun)
        while size - begin >= _HEAD.size:
            content, name = _HEAD.unpack_from(self._begun, begin)
            middle = begin + _HEAD.size + name
            if size < middle + content:
                break
            self._messages.append(
                [
                    bytes(self._begun[begin + _HEAD.size : middle]),
                    bytes(self._begun[middle : middle + content]),
                ]
            )
            begin = middle + content
        del self._begun[:begin]
        self._met_limit = len(part) == _READ
        return self._met_limit

    def _is_gone(self) -> None:
        self.is_closed = True
        self._unsent.clear()
