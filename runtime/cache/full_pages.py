"""Pages of layers that keep the keys and values of all tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.padding import RESERVED_PAGE
from .holder import Holder
from .manager import CacheManager
from .radix import RadixCache
from .room import Room
from .slabs import PageAllocator, PageKind


class FullPages(CacheManager):
    """A request holds a page for every `page_size` tokens until it ends.

    Latent, 8-bit and shared layers differ in what a page holds, not in its owner. A page belongs to
    the prefix tree or to one request. The tree therefore never has a hole here, and evicts only
    whole ends of prefixes.
    """

    hole = RESERVED_PAGE

    def __init__(self, room: Room, kind: PageKind, tree: RadixCache, page_size: int) -> None:
        self.room, self.allocator = room, PageAllocator(room.slabs, kind)
        self._tree, self.page_size = tree, page_size
        room.add(self)

    @property
    def evictable(self) -> int:
        return self._tree.evictable_pages

    @property
    def oldest(self) -> int | None:
        return self._tree.oldest

    def evict_oldest(self, most: int) -> None:
        self._tree.evict_oldest(most)

    def attach(self, request: Holder, column: list[int], end: int) -> None:
        request.pages = column[:end]

    def demand(self, request: Holder, end: int, spare: int) -> int:
        return self.room.weight(self, -(-end // self.page_size) - len(request.pages) + spare)

    def missing(self, request: Holder, end: int) -> int:
        return max(0, self.demand(request, end, 0))

    def reserve(self, request: Holder, end: int) -> bool:
        missing = -(-end // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.room.allocate(self, missing)
        if pages is None:
            return False
        request.pages += pages
        return True

    def merge(self, request: Holder, begin: int, column: list[int]) -> None:
        end = begin + len(column)
        if column[0]:
            self.allocator.free(request.pages[begin:end])
            # A new list tells a page table on a device that pages were replaced.
            request.pages = [*request.pages[:begin], *column, *request.pages[end:]]
        else:  # The node is new.
            column[:] = request.pages[begin:end]

    def number(self, block: int) -> int:
        return block

    def allocate(self, count: int) -> list[int] | None:
        return self.room.allocate(self, count)

    def forget(self, blocks: list[int]) -> None:
        self.allocator.free(blocks)

    def release(self, request: Holder) -> None:
        self.allocator.free(request.pages[request.shared_pages :])
        # A new list tells a reused batch of decodes that its request was preempted.
        request.pages = []

    def check(self, holders: Iterable[Holder], cached: list[int]) -> None:
        private = [page for request in holders for page in request.pages[request.shared_pages :]]
        owned = cached + private
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert set(owned) == self.allocator.owned(), "a page is leaked or used after it was freed"
