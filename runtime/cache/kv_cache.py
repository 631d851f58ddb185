"""Who holds which page of the KV cache and which slot of the recurrent states: what is free, and
what the scheduler asks, which is to find a prefix, reserve, share what is computed, and release.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.request import Request
from .pool import RESERVED_PAGE
from .radix import RadixCache


class PageAllocator:
    """Free pages of a pool of `num_pages`, or slots of one, number 0 excluded. Last freed, first
    reused: likely still in a cache near the core.
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


class KVCache:
    """Owns which request holds which page. Every page is free, in the prefix tree, or held by
    exactly one request. Every slot is free or held by one.

    `state_slots`: of the pool of states, the reserved one among them; 0 for models without. Then
    nothing is shared: pages alone do not say how a prefix goes on.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, share_prefixes: bool, state_slots: int = 0
    ) -> None:
        self.page_size = page_size
        self.shares_prefixes = share_prefixes and not state_slots
        self.allocator = PageAllocator(num_pages)
        self.slots = PageAllocator(state_slots) if state_slots else None
        self.radix = RadixCache(self.allocator.free, page_size, enabled=self.shares_prefixes)

    @property
    def total_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    @property
    def cached_tokens(self) -> int:
        """Tokens kept for later requests that no request uses now."""
        return self.radix.evictable_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens of pages that requests hold, alone or shared."""
        return self.total_tokens - self.allocator.free_pages * self.page_size - self.cached_tokens

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be made so by eviction."""
        return self.allocator.free_pages + self.radix.evictable_pages

    def attach(self, request: Request) -> None:
        """Give a request that holds nothing the cached prefix of its tokens, short of the last one:
        its logits are wanted.
        """
        assert not request.pages and request.node is None
        # A prompt position that was not computed has no logits, so its log-probability would be
        # missing.
        limit = 0 if request.prompt_logprobs_due else request.num_tokens - 1
        pages, node = self.radix.match(request.tokens[:limit])
        self.radix.lock(node)
        request.pages, request.node = pages, node
        request.shared_pages = len(pages)
        request.num_computed = len(pages) * self.page_size

    def pages_wanted(self, request: Request, num_new: int) -> int:
        """How many more pages `num_new` more tokens need."""
        return -(-(request.num_computed + num_new) // self.page_size) - len(request.pages)

    def reserve(self, request: Request, num_new: int) -> bool:
        """Make room for `num_new` more tokens, evicting cached prefixes where needed; False where
        there is no room.
        """
        if self.slots is not None and not request.state_slot:
            slots = self.slots.allocate(1)
            if slots is None:
                return False
            (request.state_slot,) = slots
        wanted = self.pages_wanted(request, num_new)
        if wanted <= 0:
            return True
        missing = wanted - self.allocator.free_pages
        if missing > self.radix.evictable_pages:
            return False
        if missing > 0:
            self.radix.evict(missing)
        pages = self.allocator.allocate(wanted)
        if pages is None:
            return False
        request.pages += pages
        return True

    def share(self, request: Request) -> None:
        """Put the computed whole pages of a request into the prefix tree, and hold them there."""
        pages, node = self.radix.insert(request.tokens[: request.num_computed], request.pages)
        if len(pages) <= request.shared_pages:
            return
        self.radix.lock(node)
        assert request.node is not None
        self.radix.unlock(request.node)
        request.pages[: len(pages)] = pages
        request.node, request.shared_pages = node, len(pages)

    def release(self, request: Request) -> None:
        """Take everything back from a request; what it computed stays in the prefix tree until it
        is evicted.
        """
        if request.node is None:
            return
        self.share(request)
        self.allocator.free(request.pages[request.shared_pages :])
        self.radix.unlock(request.node)
        if self.slots is not None and request.state_slot:
            self.slots.free([request.state_slot])
        request.pages, request.node = [], None
        request.shared_pages = request.num_computed = request.state_slot = 0

    def flush(self) -> int:
        """Drop every prefix that no request uses; returns the number of tokens."""
        return self.radix.evict(self.radix.evictable_pages) * self.page_size

    def check(self, holders: Iterable[Request]) -> None:
        """Assert that no page or slot is leaked and none has two owners. `holders`: every request
        that may hold some.
        """
        slots = [request.state_slot for request in holders if request.state_slot]
        assert len(slots) == len(set(slots)), "a slot has two owners"
        assert set(slots) == (self.slots.owned() if self.slots else set()), "a slot is leaked"
        in_tree = [page for node in self.radix.nodes() for page in node.pages]
        private = [page for request in holders for page in request.pages[request.shared_pages :]]
        owned = in_tree + private
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert set(owned) == self.allocator.owned(), "a page is leaked or used after it was freed"
        assert self.radix.total_pages == len(in_tree)
        assert self.radix.evictable_pages == sum(
            len(node.pages) for node in self.radix.nodes() if node.lock_count == 0
        )
