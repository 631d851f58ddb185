"""Memory that pages of several kinds share, and the pages of each kind in it.

A slab holds pages of one kind at a time. What is freed goes to whoever asks next, of any kind, as
soon as all of its slab is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class PageKind(NamedTuple):
    """`per_slab` pages fit a slab; number i of slab s is page s * `stride` + i. In memory that is
    shared each has `tensors` keys or values, one of each layer, `per_slab` apart: those of one
    layer lie side by side as far as the slab goes, which is faster to read.
    """

    per_slab: int = 1
    stride: int = 1
    tensors: int = 1


ALONE = PageKind()
"""Pages that are as large as their slab, and its only kind."""


class Slabs:
    """`count` slabs, of which number 0 is reserved. Last freed, first reused: likely still in a
    cache near the core. Those that nobody ever had cost nothing.
    """

    def __init__(self, count: int) -> None:
        assert count >= 2, "a pool needs what is reserved and one more"
        self.count = count - 1
        self._fresh = range(1, count)
        self._free: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free) + len(self._fresh)

    @property
    def touched(self) -> int:
        """Slabs that somebody has had at least once. The system allocates memory on first use."""
        return self.count - len(self._fresh)

    def take(self, count: int) -> list[int]:
        """As many; so many must be free."""
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
        """Assert that each slab is free or has pages of one kind; `kinds`: all that take some."""
        slabs = [*self._free, *self._fresh, *(slab for kind in kinds for slab in kind.slabs())]
        assert sorted(slabs) == list(range(1, self.count + 1)), "a slab is lost or has two owners"


class PageAllocator:
    """Pages of a kind, in slabs that others may take as well."""

    def __init__(self, slabs: Slabs, kind: PageKind = ALONE) -> None:
        self.source, self.kind = slabs, kind
        self.left_over = 0
        """Free pages of slabs of which others are used."""
        self._partial: dict[int, list[int]] = {}
        """Of such slabs."""
        self._owned: set[int] = set()

    @property
    def free_pages(self) -> int:
        return self.source.free * self.kind.per_slab + self.left_over

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None where fewer are free. What is left over of slabs goes first."""
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
            assert page in self._owned, f"page {page} is freed but nobody owns it"
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
        """Pages that are handed out, for checks."""
        return self._owned

    def slabs(self) -> set[int]:
        """Those of which pages are handed out, for checks."""
        taken = {page // self.kind.stride for page in self._owned}
        assert self._partial.keys() <= taken
        assert self.left_over == len(taken) * self.kind.per_slab - len(self._owned)
        return taken


class SharedPages(NamedTuple):
    """How pages of layers that keep all, and of those that keep a window's, share slabs of
    `tensors` keys or values of a layer each. Page numbers count such tensors, from the first of the
    pool on, so that every layer finds its own at the same distance from a page's first.
    """

    full: PageKind
    window: PageKind
    tensors: int

    @classmethod
    def of(cls, full_layers: int, window_layers: int, least: int = 8) -> SharedPages:
        """Of layers whose pages are equally large. A slab has at least so many pages of the larger
        kind: the number of up to twice as many that leaves least over by the smaller ones.
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
        """How many hold so many pages, whatever was freed between them: windows move on through
        theirs.
        """
        return -(-full_pages // self.full.per_slab) - (-window_pages // self.window.per_slab) + 1
