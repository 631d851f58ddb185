"""Limits the work of one turn of the event loop, and the work in progress."""

from __future__ import annotations

import asyncio
from collections import deque

TURN_WEIGHT = 2**17  # Weight of the work that may begin in one turn of the event loop.
_PAUSE = 0.01  # Seconds after a piece heavier than a turn, in which others can be answered.
_MIN_WEIGHT = 2**13  # Weight of the smallest piece, because every request takes 0.5 ms.


class Turns:
    """Spreads work that blocks the event loop over several turns, in order of arrival.

    Other callbacks of the loop run between the turns.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._left = TURN_WEIGHT
        self._is_armed = False

    async def take(self, weight: int) -> None:
        """Return in a turn of the loop that has room for work of this weight."""
        weight = max(weight, _MIN_WEIGHT)
        self._arm()
        if self._left > 0 and not self._waiting:
            self._left -= weight
            return
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((begun, weight))
        await begun

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            pause = _PAUSE if self._left < -TURN_WEIGHT else 0.0
            asyncio.get_running_loop().call_later(pause, self._next_turn)

    def _next_turn(self) -> None:
        self._is_armed, self._left = False, TURN_WEIGHT
        while self._waiting and self._left > 0:
            begun, weight = self._waiting.popleft()
            if not begun.done():
                self._left -= weight
                begun.set_result(None)
        if self._waiting or self._left < TURN_WEIGHT:
            self._arm()


class Room:
    """Limits the total weight of pieces in progress. A single piece may exceed the limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, weight: int) -> None:
        """Wait for room in order of arrival. The caller must call `give` afterwards."""
        if not self._waiting and self._fits(weight):
            self._taken += weight
            return
        let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((let_in, weight))
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.done() and not let_in.cancelled():
                self.give(weight)
            else:
                self._let_in()
            raise

    def give(self, weight: int) -> None:
        """Release room."""
        self._taken -= weight
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            let_in, weight = self._waiting[0]
            if not let_in.done():
                if not self._fits(weight):
                    return
                self._taken += weight
                let_in.set_result(None)
            self._waiting.popleft()

    def _fits(self, weight: int) -> bool:
        return self._taken == 0 or self._taken + weight <= self._most
