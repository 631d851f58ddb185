"""Hands out the pages of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

RESERVED_PAGE = 0
"""Never handed out: tokens that only pad a batch write here, and block tables are padded with it.
"""


class PageAllocator:
    """Free pages of a pool of `num_pages`, page 0 excluded. Last freed, first reused: likely still
    in a cache near the core.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the reserved page and one more"
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, RESERVED_PAGE, -1))
        self._owned = bytearray(num_pages)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None where fewer are free."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        pages = self._free[cut:]
        del self._free[cut:]
        for page in pages:
            self._owned[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._owned[page], f"page {page} is freed but nobody owns it"
            self._owned[page] = 0
            self._free.append(page)

    def owned(self) -> set[int]:
        """Pages that are handed out, for checks."""
        return {page for page, owned in enumerate(self._owned) if owned}
