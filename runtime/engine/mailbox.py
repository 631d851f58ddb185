"""The two ends of an engine process: messages that come to it, and those that it sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .ipc import decode, encode
from .messages import FromEngine, Shutdown


class Mailbox:
    """Over ZeroMQ's sockets. `is_open`: until the engine is told to end."""

    def __init__(self, inbox: Any, outbox: Any) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.is_open = True

    def waits(self, milliseconds: int) -> bool:
        """Whether a message is there, or comes within so long."""
        return bool(self._inbox.poll(milliseconds))

    def received(self, patience: int) -> Iterator[Any]:
        """Every message that is there; waits up to `patience` milliseconds for the first."""
        while self.is_open and self.waits(patience):
            message = decode(self._inbox.recv_multipart())
            patience = 0
            if isinstance(message, Shutdown):
                self.is_open = False
            else:
                yield message

    def send(self, message: FromEngine) -> None:
        self._outbox.send_multipart(encode(message))
