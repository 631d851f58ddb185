"""Memory that pages of several kinds share, and the allocator of each kind.

A slab holds pages of one kind at a time. Once all of its pages are free, any kind can take it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PageKind(NamedTuple):
    """How pages of one kind lie in a slab.

    Attributes:
        per_slab: Pages per slab.
        stride: Page i of slab s has number s * `stride` + i.
        tensors: In shared memory, the key and value tensors of a page, one of each for every layer.
            They are `per_slab` tensors apart, so that the pages of one layer are contiguous within
            a slab, which is faster to read.
    """

    per_slab: int = 1
    stride: int = 1
    tensors: int = 1


ALONE = PageKind()  # Each page is a slab, and no other kind shares the memory.


class Slabs:
    """`count` slabs. Slab 0 is reserved.

    The slab freed last is reused first, because it is likely still in a CPU cache. Slabs that were
    never used cost nothing.
    """

    def __init__(self, count: int) -> None:
        assert count >= 2, "a pool needs the reserved slab and one more"
        self.count = count - 1
        self._fresh = range(1, count)
        self._free: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free) + len(self._fresh)

    @property
    def touched(self) -> int:
        """Number of slabs used at least once. The system allocates memory on first use."""
        return self.count - len(self._fresh)

    def take(self, count: int) -> list[int]:
        """Take `count` slabs. As many must be free."""
        cut = max(0, len(self._free) - count)
        taken = self._free[cut:]
        del self._free[cut:]
        if missing := count - len(taken):
            taken += self._fresh[:missing]
            self._fresh = self._fresh[missing:]
        return taken

    def give_back(self, slab: int) -> None:
        self._free.append(slab)

    def check(self, kinds: Iterable[PageAllocator]) -> None:
        """Assert that each slab is free or owned by one of `kinds`, which are all allocators."""
        slabs = [*self._free, *self._fresh, *(slab for kind in kinds for slab in kind.slabs())]
        assert sorted(slabs) == list(range(1, self.count + 1)), "a slab is lost or has two owners"


class PageAllocator:
    """Allocates pages of one kind in slabs that other kinds use too."""

    def __init__(self, slabs: Slabs, kind: PageKind = ALONE) -> None:
        self.source, self.kind = slabs, kind
        self.left_over = 0  # Free pages in slabs that also have used pages.
        self._partial: dict[int, list[int]] = {}  # Those free pages, by slab.
        self._owned: set[int] = set()

    @property
    def free_pages(self) -> int:
        return self.source.free * self.kind.per_slab + self.left_over

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages, from partly used slabs first. None if fewer are free."""
        if count > self.free_pages:
            return None
        per_slab, stride, _ = self.kind
        pages: list[int] = []
        while self._partial and len(pages) < count:
            slab, free = self._partial.popitem()
            cut = max(0, len(free) - (count - len(pages)))
            pages += free[cut:]
            if cut:
                self._partial[slab] = free[:cut]
        self.left_over -= len(pages)
        slabs = self.source.take(-(-(count - len(pages)) // per_slab))
        new = [slab * stride + place for slab in slabs for place in range(per_slab)]
        if rest := new[count - len(pages) :]:
            self._partial[slabs[-1]] = rest[::-1]
            self.left_over += len(rest)
        pages += new[: count - len(pages)]
        self._owned.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        per_slab, stride, _ = self.kind
        for page in pages:
            assert page in self._owned, f"page {page} is freed, but it is not allocated"
            self._owned.remove(page)
            slab = page // stride
            if per_slab > 1:
                free = self._partial.setdefault(slab, [])
                free.append(page)
                self.left_over += 1
                if len(free) < per_slab:
                    continue
                del self._partial[slab]
                self.left_over -= per_slab
            self.source.give_back(slab)

    def owned(self) -> set[int]:
        """The allocated pages, for checks."""
        return self._owned

    def slabs(self) -> set[int]:
        """The slabs with allocated pages, for checks."""
        taken = {page // self.kind.stride for page in self._owned}
        assert self._partial.keys() <= taken
        assert self.left_over == len(taken) * self.kind.per_slab - len(self._owned)
        return taken


class SharedPages(NamedTuple):
    """How full layers and windowed layers share slabs of `tensors` tensors.

    A tensor holds the keys or the values of one page of one layer. Page numbers count tensors from
    the beginning of the pool, so that every layer finds its tensor at the same distance from the
    first tensor of the page.
    """

    full: PageKind
    window: PageKind
    tensors: int

    @classmethod
    def of(cls, full_layers: int, window_layers: int, least: int = 8) -> SharedPages:
        """Choose the size of a slab for layers whose pages have equal sizes.

        A slab holds `least` to 2 * `least` - 1 pages of the larger kind: the number that wastes the
        smallest share of the slab when it holds pages of the smaller kind.
        """
        small, large = sorted((2 * full_layers, 2 * window_layers))
        sizes = [large * count for count in range(least, 2 * least)]
        size = min(sizes, key=lambda each: each % small / each)
        full, window = (
            PageKind(size // (2 * layers), size, 2 * layers)
            for layers in (full_layers, window_layers)
        )
        return cls(full, window, size)

    def slabs(self, full_pages: int, window_pages: int) -> int:
        """Number of slabs that hold these pages, also if windows leave free pages between them."""
        return -(-full_pages // self.full.per_slab) - (-window_pages // self.window.per_slab) + 1
