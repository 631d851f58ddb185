"""What is free in the memory of pages or can be made so, and what gives way first."""

from __future__ import annotations

from .block_pool import BlockPool
from .radix import RadixCache
from .slabs import PageAllocator


class Room:
    """Of `pages`, which the `tree` keeps for later requests, and of `windows`, where those lie in
    the same memory. Pages are counted by weight: a slab has as many of one kind as a page of the
    other weighs.
    """

    def __init__(
        self, pages: PageAllocator, tree: RadixCache, windows: BlockPool | None = None
    ) -> None:
        self._pages, self._tree, self._windows = pages, tree, windows
        self._page_weight = self._window_weight = 1
        if windows is not None:
            self._page_weight = windows.allocator.kind.per_slab
            self._window_weight = pages.kind.per_slab
        self._slab_weight = self._page_weight * pages.kind.per_slab

    def weight(self, pages: int, of_windows: int) -> int:
        """Of so many pages; those of windows weigh nothing in other memory."""
        own = pages * self._page_weight
        return own if self._windows is None else own + of_windows * self._window_weight

    @property
    def total(self) -> int:
        return self._pages.source.count * self._slab_weight

    @property
    def free(self) -> int:
        left_over = 0 if self._windows is None else self._windows.allocator.left_over
        slabs = self._pages.source.free * self._slab_weight
        return slabs + self.weight(self._pages.left_over, left_over)

    @property
    def evictable(self) -> int:
        idle = 0 if self._windows is None else self._windows.idle
        return self.weight(self._tree.evictable_pages, idle)

    def has(self, pages: int, of_windows: int) -> bool:
        """Whether so many are free or can be made so; a few may not, where slabs of either kind
        have some left over.
        """
        return self.weight(pages, of_windows) <= self.free + self.evictable

    def pages_with(self, given_back: int) -> int:
        """How many there are of both kinds, once so many of windows are given back."""
        room = self.free + self.evictable + self.weight(0, given_back)
        # What is left over of a slab may be of the other kind.
        return (room - self._slab_weight) // self.weight(1, 1)

    def evict(self, allocator: PageAllocator, count: int) -> bool:
        """Evict until `count` pages of an allocator are free: of all that is kept in this memory
        what was used least recently. False where that does not suffice.
        """
        while (missing := count - allocator.free_pages) > 0:
            pages = self._tree.oldest
            block = None if self._windows is None else self._windows.oldest
            if self._windows is not None and block is not None and (pages is None or block < pages):
                self._windows.take_oldest()
            elif pages is not None:
                # As many as make a page of the other kind, if it is wanted.
                of_slab = self._pages.kind.per_slab
                self._tree.evict_oldest(missing if allocator is self._pages else of_slab)
            else:
                return False
        return True
