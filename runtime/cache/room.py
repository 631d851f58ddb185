"""Counts the memory that is free or can be evicted, and evicts it."""

from __future__ import annotations

import math
from typing import Protocol

from .slabs import PageAllocator, Slabs


class Evictable(Protocol):
    """Pages of one kind. Some of them only cache a prefix, so they can be evicted."""

    allocator: PageAllocator

    @property
    def evictable(self) -> int:
        """Number of pages that can be evicted."""

    @property
    def oldest(self) -> int | None:
        """Time of the last use of the pages that are evicted next; None if there are none."""

    def evict_oldest(self, most: int) -> None:
        """Evict at least one and at most `most` pages of that time. There must be some."""


class Room:
    """Memory that pages of one or more kinds share. Each kind adds itself.

    Memory is counted in units of weight. A slab weighs the product of the numbers of pages that it
    holds of each kind. It thus weighs the same with pages of any kind.
    """

    def __init__(self, slabs: Slabs) -> None:
        self.slabs = slabs
        self._kinds: list[Evictable] = []
        self._slab_weight = 1

    def add(self, kind: Evictable) -> None:
        self._kinds.append(kind)
        self._slab_weight = math.prod(each.allocator.kind.per_slab for each in self._kinds)

    def weight(self, kind: Evictable, pages: int) -> int:
        return pages * (self._slab_weight // kind.allocator.kind.per_slab)

    @property
    def total(self) -> int:
        return self.slabs.count * self._slab_weight

    @property
    def free(self) -> int:
        partial = sum(self.weight(kind, kind.allocator.left_over) for kind in self._kinds)
        return self.slabs.free * self._slab_weight + partial

    @property
    def evictable(self) -> int:
        return sum(self.weight(kind, kind.evictable) for kind in self._kinds)

    def has(self, weight: int) -> bool:
        """Whether pages of this weight are free or evictable.

        Partly used slabs count fully, so an allocation may still fail by a few pages.
        """
        return weight <= self.free + self.evictable

    def pages_of_each(self, freed: int) -> int:
        """Number of pages of every kind that fit at once after a weight of `freed` is freed."""
        # The rest of one slab may belong to each other kind.
        left = self.free + self.evictable + freed - self._slab_weight * (len(self._kinds) - 1)
        return left // sum(self.weight(kind, 1) for kind in self._kinds)

    def allocate(self, kind: Evictable, count: int) -> list[int] | None:
        """Allocate pages. If needed, evict the least recently used pages of all kinds.

        Return None if too few pages are free or evictable.
        """
        if count > kind.allocator.free_pages and not self.has(self.weight(kind, count)):
            return None
        while (missing := count - kind.allocator.free_pages) > 0:
            last_uses = {last: each for each in self._kinds if (last := each.oldest) is not None}
            if not last_uses:
                return None
            oldest = last_uses[min(last_uses)]
            # Other kinds must free whole slabs.
            oldest.evict_oldest(missing if oldest is kind else oldest.allocator.kind.per_slab)
        return kind.allocator.allocate(count)

    def check(self) -> None:
        """Assert that no slab is lost and that the counts of free and evictable memory are sane."""
        self.slabs.check([kind.allocator for kind in self._kinds])
        assert self.free + self.evictable <= self.total
