"""Sees to it that a client reads what has been written for it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from ..config.http_limits import HttpLimits

SECOND_LOOK = 0.2
"""Seconds between a time-out and its effect: what came while this process stood still is read
first.
"""
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for no time."""


class SlowReader:
    """Calls `give_up` where a client takes less than `--min-transfer-rate` of what waits for it,
    for `--timeout-write` seconds.
    """

    def __init__(self, limits: HttpLimits, give_up: Callable[[], None]) -> None:
        self._limits = limits
        self._give_up = give_up
        self._unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        """From now on, anew."""
        self.stop()
        self._unsent = transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(
            self._limits.timeout_write, self._look, transport, False
        )

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, transport: asyncio.Transport, looked_again: bool) -> None:
        unsent = transport.get_write_buffer_size()
        if self._unsent - unsent >= least_bytes(self._limits, self._limits.timeout_write):
            self.watch(transport)
        elif unsent and looked_again:
            # Have the kernel forget what it would otherwise try to send for minutes.
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            )
            self._give_up()
        elif unsent:
            self._timer = asyncio.get_running_loop().call_later(
                SECOND_LOOK, self._look, transport, True
            )


def least_bytes(limits: HttpLimits, seconds: float) -> float:
    """What must move in so many seconds, either way."""
    return max(1.0, limits.min_transfer_rate * seconds)
