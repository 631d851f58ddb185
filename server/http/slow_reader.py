"""Disconnects clients that do not read their answers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from ..config.http_limits import HttpLimits

# Seconds between a timeout and its effect. Data that arrived while this process was suspended is
# read first.
SECOND_LOOK = 0.2
_NO_LINGER = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds.


class SlowReader:
    """Calls `give_up` if a client reads more slowly than `--min-transfer-rate`.

    The rate is measured over `--timeout-write` seconds.
    """

    def __init__(self, limits: HttpLimits, give_up: Callable[[], None]) -> None:
        self._limits = limits
        self._give_up = give_up
        self._unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        """Start to watch a transport. This restarts the measurement."""
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
            # Drop the kernel's buffer, which it would otherwise try to send for minutes.
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
            )
            self._give_up()
        elif unsent:
            self._timer = asyncio.get_running_loop().call_later(
                SECOND_LOOK, self._look, transport, True
            )


def least_bytes(limits: HttpLimits, seconds: float) -> float:
    """Return the minimum number of bytes to transfer in `seconds`."""
    return max(1.0, limits.min_transfer_rate * seconds)
