"""The two ends of an engine process: messages that come to it, and those that it sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.messages import FromEngine, Shutdown
from .ipc import decode, encode
from .message_socket import MessageSocket

_TAKING_MS = 100
"""How long to wait for the web process to take more of a long message: it does so at once, unless
it is busy.
"""


class Mailbox:
    """`is_open`: until the engine is told to end."""

    def __init__(self, socket: MessageSocket) -> None:
        self._socket = socket
        self.is_open = True

    def waits(self, milliseconds: int) -> bool:
        """Whether a message is there, or comes within so long."""
        return self._socket.poll(milliseconds)

    def received(self, patience: int) -> Iterator[Any]:
        """Every message that is there; waits up to `patience` milliseconds for the first."""
        while self.is_open and self.waits(patience):
            frames = self._socket.receive()
            assert frames is not None
            message, patience = decode(frames), 0
            if isinstance(message, Shutdown):
                self.is_open = False
            else:
                yield message

    def send(self, message: FromEngine) -> None:
        """Waits until it has left, for as long as the web process takes it. An image or many
        log-probabilities are more than a socket holds: what is left of them would leave in parts,
        one with each step, and a step may take minutes.
        """
        if not self._socket.send(encode(message)):
            self._socket.drain(_TAKING_MS)
