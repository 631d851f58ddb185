"""The mailbox of an engine that is asked for nothing, and then told to end."""

from __future__ import annotations

from typing import Any, cast

from piecework.runtime.core.messages import Shutdown
from piecework.runtime.process.ipc import encode
from piecework.runtime.process.mailbox import Mailbox


class _Nobody:
    """The other end: so many looks find nothing."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def poll(self, patience: int) -> bool:
        self._looks -= 1
        return self._looks < 0

    def receive(self) -> Any:
        return encode(Shutdown())

    def send(self, frames: Any) -> bool:
        return True


def idle_mailbox(looks: int) -> Mailbox:
    return Mailbox(cast("Any", _Nobody(looks)))
