"""Counts the memory that is free or can be evicted, and evicts it."""

from __future__ import annotations

from .block_pool import BlockPool
from .radix import RadixCache
from .slabs import PageAllocator


class Room:
    """The memory of `pages`, which `tree` caches, and of `windows` if they share it.

    Memory is counted in units of weight. A full page weighs as much as a slab has window pages, and
    a window page as much as a slab has full pages, so that a slab weighs the same with either kind.
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
        """Weight of pages. Window pages weigh 0 if they have memory of their own."""
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
        """Whether these pages are free or evictable.

        Partly used slabs count fully, so an allocation may still fail by a few pages.
        """
        return self.weight(pages, of_windows) <= self.free + self.evictable

    def pages_with(self, freed: int) -> int:
        """Number of pages of each kind available once `freed` window pages are freed."""
        room = self.free + self.evictable + self.weight(0, freed)
        # The rest of one slab may belong to the other kind.
        return (room - self._slab_weight) // self.weight(1, 1)

    def evict(self, allocator: PageAllocator, count: int) -> bool:
        """Evict least recently used pages of both kinds until `allocator` has `count` free pages.

        Return False if that does not suffice.
        """
        while (missing := count - allocator.free_pages) > 0:
            pages = self._tree.oldest
            block = None if self._windows is None else self._windows.oldest
            if self._windows is not None and block is not None and (pages is None or block < pages):
                self._windows.evict_oldest()
            elif pages is not None:
                # If window pages are wanted, evict a whole slab.
                per_slab = self._pages.kind.per_slab
                self._tree.evict_oldest(missing if allocator is self._pages else per_slab)
            else:
                return False
        return True
