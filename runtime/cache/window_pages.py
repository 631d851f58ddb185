"""Pages of layers with a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .block_pool import HOLE, Block, BlockPool, end_of_run
from .holder import Holder
from .manager import CacheManager


class WindowPages(CacheManager):
    """A request holds the pages that a query will still reach.

    A query reaches at most `window` tokens, its own included. To continue a prefix, a request needs
    the pages of the last window before the end of the prefix.
    """

    hole = HOLE

    def __init__(self, blocks: BlockPool, window: int, page_size: int) -> None:
        self.room, self._blocks = blocks.room, blocks
        self._window, self.page_size = window, page_size
        self._span = -(-(window - 1) // page_size)  # Most pages before the one of a query.

    def resumable(self, column: list[Block], end: int) -> int:
        return end_of_run(column, end, self._span)

    def attach(self, request: Holder, column: list[Block], end: int) -> None:
        request.window_begin = begin = max(0, end - self._span)
        request.window = [HOLE] * begin + column[begin:end]
        for block in column[begin:end]:
            self._blocks.hold(block)

    def demand(self, request: Holder, end: int, spare: int) -> int:
        missing = -(-end // self.page_size) - len(request.window)
        # A prompt frees the pages beyond its window as it proceeds.
        return self.room.weight(self._blocks, min(missing, self._span + 1) + spare)

    def limit(self, request: Holder, num_new: int) -> int:
        """The step ends where pages run out."""
        leaving = request.window[request.window_begin : self._first_reached(request)]
        freed = sum(block.holders == 1 for block in leaving)
        pages = self.room.pages_of_each(self.room.weight(self._blocks, freed))
        most = (len(request.window) + pages) * self.page_size - request.num_computed
        return min(num_new, most) if most > 0 else num_new

    def missing(self, request: Holder, end: int) -> int:
        first = self._first_reached(request)
        for place in range(request.window_begin, first):
            self._blocks.let_go(request.window[place])
            request.window[place] = HOLE
            request.window_begin = place + 1
        pages = -(-end // self.page_size) - len(request.window)
        return self.room.weight(self._blocks, max(0, pages))

    def reserve(self, request: Holder, end: int) -> bool:
        pages = -(-end // self.page_size) - len(request.window)
        blocks = self._blocks.allocate(pages) if pages > 0 else []
        if blocks is None:
            return False
        request.window += blocks
        return True

    def merge(self, request: Holder, begin: int, column: list[Block]) -> None:
        end, window = begin + len(column), request.window
        for place in range(max(begin, request.window_begin), end):
            own, cached = request.window[place], column[place - begin]
            if not cached.number:
                column[place - begin], own.kept = own, True
            elif cached is not own:
                self._blocks.hold(cached)
                self._blocks.let_go(own)
                if request.window is window:
                    # A new list tells a page table on a device that pages were replaced.
                    request.window = [*window]
                request.window[place] = cached

    def number(self, block: Block) -> int:
        return block.number

    def continues(self, end: int) -> int:
        return max(0, end - self._span)

    def keep(self, blocks: list[Block], seconds: float, client: str) -> None:
        for block in blocks:
            self._blocks.keep(block, seconds, client)

    def allocate(self, count: int) -> list[Block] | None:
        blocks = self._blocks.allocate(count)
        for block in blocks or ():
            self._blocks.offer(block)
        return blocks

    def name(self, block: Block, key: bytes) -> None:
        if block.number:
            block.key = key

    def save_by(self, save: Callable[[bytes, int], None]) -> None:
        self._blocks.save = save

    def forget(self, blocks: list[Block]) -> None:
        self._blocks.forget(blocks)

    def release(self, request: Holder) -> None:
        for block in request.window:
            self._blocks.let_go(block)
        request.window, request.window_begin = [], 0

    def check(self, holders: Iterable[Holder], cached: list[Block]) -> None:
        held: list[Block] = []
        for request in holders:
            assert all(block is HOLE for block in request.window[: request.window_begin])
            held += request.window[request.window_begin :]
        self._blocks.check(held, cached)

    def _first_reached(self, request: Holder) -> int:
        """The first page of the request that the first query of the next step reaches."""
        first = max(0, request.num_computed - self._window + 1) // self.page_size
        return min(first, len(request.window))
