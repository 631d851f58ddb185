"""The owner of every page of the KV cache and of every slot of the recurrent states.

The scheduler asks it to find a prefix, to reserve pages, to share computed pages and to release
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from ..core.padding import RESERVED_SLOT
from .block_pool import HOLE, BlockGroup, BlockPool
from .holder import Holder
from .kv_events import KVEvents
from .radix import Column, RadixCache
from .room import Room
from .slabs import ALONE, PageAllocator, SharedPages, Slabs


class KVCache:
    """Every page is free, in the prefix tree, or held by exactly one request.

    Recurrent states: a prefix is shared if the tree has a snapshot of the state at its end. A
    snapshot is taken at the page border where a prompt ends, and where it leaves a known prefix, if
    at least `snapshot_tokens` tokens are new. `state_slots` counts the slots, the reserved one
    included; 0 for models without states.

    Sliding windows: layers with a window of at most `window` tokens have pages of their own. A
    request holds those that a query will still reach. A prefix is shared if the tree has the pages
    of its last window. Either there are `window_pages` of them, the reserved one included, or both
    kinds are `shared` in `num_slabs` slabs, which hold `num_pages` full pages of usual texts.

    `events` records the pages that enter and leave the tree.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        share_prefixes: bool,
        state_slots: int = 0,
        snapshot_tokens: int = 64,
        window: int | None = None,
        window_pages: int = 0,
        shared: SharedPages | None = None,
        num_slabs: int = 0,
        events: KVEvents | None = None,
    ) -> None:
        self.page_size = page_size
        self.total_tokens = (num_pages - 1) * page_size
        self.shares_prefixes = share_prefixes
        full, own = (ALONE, ALONE) if shared is None else (shared.full, shared.window)
        slabs, clock = Slabs(num_pages if shared is None else num_slabs), count(1)
        self.allocator = PageAllocator(slabs, full)
        self._window = window or 1
        self.windows: BlockGroup | None = None
        if window is not None:
            slabs = slabs if shared is not None else Slabs(window_pages)
            span = -(-(window - 1) // page_size)
            self.windows = BlockGroup(BlockPool(PageAllocator(slabs, own), clock), span)
        self.states = BlockPool(PageAllocator(Slabs(state_slots))) if state_slots else None
        self._snapshot_tokens = snapshot_tokens if share_prefixes else None
        groups = [self.windows] if self.windows is not None else []
        groups += [BlockGroup(self.states, 1)] if self.states is not None else []
        self.radix = RadixCache(
            self.allocator.free,
            page_size,
            enabled=share_prefixes,
            groups=groups,
            events=events,
            clock=clock,
        )
        sharing = self.windows if shared is not None else None
        self.room = Room(self.allocator, self.radix, sharing.blocks if sharing else None)
        self._shares_windows = sharing is not None

    @property
    def cached_tokens(self) -> int:
        """Number of cached tokens that no request uses."""
        return self._in_tokens(self.room.evictable)

    @property
    def used_tokens(self) -> int:
        """Number of tokens in pages that requests hold, alone or shared.

        If kinds of pages share memory, this is a share of the memory, in tokens of usual texts.
        """
        return self._in_tokens(self.room.total - self.room.free - self.room.evictable)

    @property
    def touched_tokens(self) -> int:
        """Tokens of pages that were used at least once, as a share of the memory."""
        slabs = self.allocator.source
        return -(-slabs.touched * self.total_tokens // slabs.count)

    @property
    def total_states(self) -> int:
        """Number of slots of recurrent states."""
        return 0 if self.states is None else self.states.size

    @property
    def used_states(self) -> int:
        """Number of slots that requests hold, without cached snapshots."""
        return 0 if self.states is None else self.states.size - self.states.available

    def attach(self, request: Holder) -> None:
        """Give a request without pages the cached prefix of its tokens.

        The last token is always computed, because its logits are wanted.
        """
        assert not request.pages and request.node is None
        # Log-probabilities of a prompt need the logits of every position.
        limit = 0 if request.prompt_logprobs_due else request.num_tokens - 1
        pages, node = self.radix.match(request.tokens[:limit])
        if self.windows is not None or self.states is not None:
            request.branch = len(pages) * self.page_size
            pages, node, ends = self.radix.resume(pages, node)
            if self.states is not None:
                state = ends.pop()
                request.state_source = state[0].number if state else RESERVED_SLOT
                for block in state:
                    self.states.touch(block)
            if self.windows is not None:
                request.window_begin = len(pages) - len(ends[0])
                request.window = [HOLE] * request.window_begin + ends[0]
                for block in ends[0]:
                    self.windows.blocks.hold(block)
        self.radix.lock(node)
        request.pages, request.node = pages, node
        request.shared_pages = len(pages)
        request.num_computed = request.saved_at = len(pages) * self.page_size

    def has_room(self, request: Holder, num_new: int, spare: int) -> bool:
        """Whether `num_new` more tokens fit, by eviction too, with `spare` pages left."""
        wanted = self._pages_wanted(request, num_new)
        of_windows = 0
        if self.windows is not None:
            # A prompt frees the pages beyond its window as it proceeds.
            of_windows = min(wanted, self.windows.span + 1) + spare
            if not self._shares_windows and of_windows > self.windows.blocks.available:
                return False
        if not self.room.has(wanted + spare, of_windows):
            return False
        return self.states is None or request.state is not None or self.states.available > 0

    def whole_pages(self, request: Holder, num_new: int) -> int:
        """Return how many of `num_new` tokens the next step takes.

        The step ends where window pages run out, where a snapshot is wanted, or, inside a prompt of
        a model with states, at a page border, where a snapshot is possible.
        """
        num_new = self._within_windows(request, num_new)
        begin, end = request.num_computed, request.num_computed + num_new
        if self.states is None or self._snapshot_tokens is None or begin >= request.num_prompt:
            return num_new
        for border in sorted(self._borders(request)):
            if begin < border < end and border - request.saved_at >= self._snapshot_tokens:
                return border - begin
        border = end // self.page_size * self.page_size
        return border - begin if begin < border and end < request.num_tokens else num_new

    def reserve(self, request: Holder, num_new: int) -> bool:
        """Allocate pages for `num_new` more tokens, by eviction if needed. False if they do not
        fit.
        """
        wanted = max(0, self._pages_wanted(request, num_new))
        of_windows = 0
        if self.windows is not None:
            self._leave_behind(self.windows, request)
            of_windows = len(request.pages) + wanted - len(request.window)
        if (wanted or of_windows) and not self._take_pages(request, wanted, of_windows):
            return False
        return self.states is None or self._reserve_state(
            self.states, request, request.num_computed + num_new
        )

    def found_until(self, request: Holder, num_new: int) -> int:
        """Number of tokens of the prefix that other requests find after the reserved step.

        It ends at the next page, or at the snapshot for models with states. 0 without a snapshot.
        """
        if self.states is None:
            return request.num_computed + self.page_size
        return 0 if request.snapshot is None else request.num_computed + num_new

    def advance(self, request: Holder, num_new: int) -> None:
        """Record that the step with the `num_new` reserved tokens was launched.

        Computed pages of a prompt are shared at once: a request that finds them reads them in a
        later step, which the device runs after this one.
        """
        prefills = request.num_computed < request.num_prompt
        request.num_computed += num_new
        request.state_source = None
        if self.states is not None and request.snapshot is not None:
            self._drop_saved(request)
            request.saved[request.num_computed // self.page_size - 1] = request.snapshot
            self.states.offer(request.snapshot)
            request.saved_at, request.snapshot = request.num_computed, None
        if prefills:
            self._share(request)

    def release(self, request: Holder) -> None:
        """Free everything that a request holds. Its computed pages stay cached until eviction."""
        if request.node is None:
            return
        self._share(request)
        self.allocator.free(request.pages[request.shared_pages :])
        self.radix.unlock(request.node)
        # A new list tells a reused batch of decodes that its request was preempted.
        request.pages, request.node = [], None
        request.shared_pages = request.num_computed = 0
        if self.windows is not None:
            for block in request.window:
                self.windows.blocks.let_go(block)
            request.window, request.window_begin = [], 0
        if self.states is not None:
            self._drop_saved(request)
            for own in (request.state, request.snapshot):
                self.states.let_go(own or HOLE)
            request.state = request.snapshot = request.state_source = None

    def flush(self) -> int:
        """Evict every prefix that no request uses. Return the number of tokens."""
        freed = self.radix.evict(self.radix.evictable_pages)
        if self.radix.events is not None and freed and not self.radix.total_pages:
            self.radix.events.cleared()
        return freed * self.page_size

    def check(self, holders: Iterable[Holder]) -> None:
        """Assert that no page or slot is leaked and none has two owners.

        `holders` are all requests that may hold pages.
        """
        holders = list(holders)
        nodes = list(self.radix.nodes())
        in_tree = [page for node in nodes for page in node.pages]
        private = [page for request in holders for page in request.pages[request.shared_pages :]]
        owned = in_tree + private
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert set(owned) == self.allocator.owned(), "a page is leaked or used after it was freed"
        assert self.radix.total_pages == len(in_tree)
        assert self.radix.evictable_pages == sum(
            len(node.pages) for node in nodes if node.lock_count == 0
        )
        assert all(len(each) == len(node.pages) for node in nodes for each in node.columns)
        kinds = [self.allocator]
        kinds += [self.windows.blocks.allocator] if self.windows is not None else []
        for slabs in {kind.source for kind in kinds}:
            slabs.check([kind for kind in kinds if kind.source is slabs])
        assert self.room.free + self.room.evictable <= self.room.total
        if self.windows is not None:
            for request in holders:
                assert all(block is HOLE for block in request.window[: request.window_begin])
            self.windows.blocks.check(
                [block for each in holders for block in each.window[each.window_begin :]],
                [block for node in nodes for block in node.columns[0]],
            )
        if self.states is not None:
            held = [block for each in holders for block in (each.state, each.snapshot)]
            kept = [block for node in nodes for block in node.columns[-1]]
            kept += [block for each in holders for block in each.saved.values()]
            self.states.check([block for block in held if block is not None], kept)

    def _pages_wanted(self, request: Holder, num_new: int) -> int:
        """Number of pages that `num_new` more tokens need beyond the request's own."""
        return -(-(request.num_computed + num_new) // self.page_size) - len(request.pages)

    def _borders(self, request: Holder) -> tuple[int, int]:
        """Ends of prefixes that another prompt may continue, in tokens: where this prompt leaves
        the tree, and its last whole page.
        """
        return request.branch, (request.num_tokens - 1) // self.page_size * self.page_size

    def _is_wanted(self, request: Holder, end: int) -> bool:
        """Whether a snapshot after `end` tokens is worth a slot.

        In a long prompt only chunks at doubling distances are, otherwise the snapshots of one
        prompt would evict those of others.
        """
        is_chunk = end < request.num_prompt and end not in self._borders(request)
        return not is_chunk or end >= 2 * request.saved_at

    def _within_windows(self, request: Holder, num_new: int) -> int:
        """Reduce `num_new` to the tokens that find window pages now, if any do."""
        if self.windows is None or num_new == 1:
            return num_new
        reach = min(self._reach(request), len(request.window))
        leaving = request.window[request.window_begin : reach]
        freed = sum(block.holders == 1 for block in leaving)
        if self._shares_windows:
            pages = self.room.pages_with(freed)
        else:
            pages = self.windows.blocks.available + freed
        most = (len(request.window) + pages) * self.page_size - request.num_computed
        return min(num_new, most) if most > 0 else num_new

    def _reach(self, request: Holder) -> int:
        """The first page that the first query of the next step reaches."""
        return max(0, request.num_computed - self._window + 1) // self.page_size

    def _leave_behind(self, windows: BlockGroup, request: Holder) -> None:
        """Free the window pages that the first query of the next step no longer reaches."""
        first = min(self._reach(request), len(request.window))
        for place in range(request.window_begin, first):
            windows.blocks.let_go(request.window[place])
            request.window[place] = HOLE
            request.window_begin = place + 1

    def _take_pages(self, request: Holder, count: int, of_windows: int) -> bool:
        """Allocate pages of both kinds, by eviction if needed. False if there are fewer."""
        if not self.room.has(count, of_windows) or not self.room.evict(self.allocator, count):
            return False
        request.pages += self.allocator.allocate(count) or []
        if self.windows is not None:
            blocks = self.windows.blocks
            if self._shares_windows:
                self.room.evict(blocks.allocator, of_windows)
            new = blocks.allocate(of_windows)
            if new is None:
                return False
            request.window += new
        return True

    def _in_tokens(self, weight: int) -> int:
        """Convert a weight of memory into tokens of usual texts."""
        return -(-weight * self.total_tokens // self.room.total)

    def _reserve_state(self, states: BlockPool, request: Holder, end: int) -> bool:
        """Allocate the slot of a state, and one for its snapshot if it is wanted and available."""
        if request.state is None:
            blocks = states.allocate(1)
            if blocks is None:
                return False
            (request.state,) = blocks
        # A repeated plan may end at another token.
        states.let_go(request.snapshot or HOLE)
        request.snapshot = None
        if (
            self._snapshot_tokens is not None
            and end % self.page_size == 0
            and end - request.saved_at >= self._snapshot_tokens
            and self._is_wanted(request, end)
        ):
            blocks = states.allocate(1)
            request.snapshot = blocks[0] if blocks else None
        return True

    def _share(self, request: Holder) -> None:
        """Insert the computed whole pages of a request into the prefix tree and lock them."""
        tokens = request.tokens[: request.num_computed]
        columns: list[Column] = []
        saved, request.saved = request.saved, {}
        if self.states is not None:
            saved = {place: each for place, each in saved.items() if self.states.reclaim(each)}
            columns.append(saved)
        if self.windows is not None:
            begin = max(request.window_begin, request.shared_pages)
            window = dict(enumerate(request.window[begin:], begin))
            columns.insert(0, window)
        pages, node = self.radix.insert(tokens, request.pages, columns)
        if self.windows is not None:
            request.window[begin:] = window.values()
        if self.states is not None:
            for place, block in saved.items():
                if place < len(pages):
                    # The tree owns the snapshot now.
                    self.states.let_go(block)
                else:
                    self.states.offer(block)
                    request.saved[place] = block
        if len(pages) <= request.shared_pages:
            return
        self.radix.lock(node)
        assert request.node is not None
        self.radix.unlock(request.node)
        request.pages[: len(pages)] = pages
        request.node, request.shared_pages = node, len(pages)

    def _drop_saved(self, request: Holder) -> None:
        if self.states is not None:
            for block in request.saved.values():
                self.states.forget(block)
            request.saved.clear()
