"""Receives and sends the messages of an engine process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.messages import FromEngine, Shutdown
from .ipc import decode, encode
from .message_socket import MessageSocket

_DRAIN_MS = 100  # How long to wait for the web process to read more of a long message.


class Mailbox:
    """The messages of an engine process. `is_open` is False after the message `Shutdown`."""

    def __init__(self, socket: MessageSocket) -> None:
        self._socket = socket
        self.is_open = True

    def waits(self, milliseconds: int) -> bool:
        """Whether a message has arrived, or arrives within this time."""
        return self._socket.poll(milliseconds)

    def received(self, patience: int) -> Iterator[Any]:
        """Yield all messages that have arrived.

        Wait up to `patience` milliseconds for the first.
        """
        while self.is_open and self.waits(patience):
            frames = self._socket.receive()
            assert frames is not None
            message, patience = decode(frames), 0
            if isinstance(message, Shutdown):
                self.is_open = False
            else:
                yield message

    def send(self, message: FromEngine) -> None:
        """Send a message. Wait until it is sent, for as long as the web process keeps reading.

        Images and many log-probabilities are larger than a socket's buffer. Without waiting, the
        rest would be sent in parts, one per step, and a step may take minutes.
        """
        if not self._socket.send(encode(message)):
            self._socket.drain(_DRAIN_MS)
