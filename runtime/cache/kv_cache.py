"""The caches of a model: which request holds which blocks, and which prefixes are found again.

The scheduler asks it to find a prefix, to reserve memory, to share computed pages and to release
them. Every method asks all managers (`manager.CacheManager`) and knows none of their kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .holder import Holder
from .manager import CacheManager
from .pins import Clock
from .radix import RadixCache
from .room import Room


class KVCache:
    """Every block of a cache is free, in the prefix tree, or held by exactly one request.

    Attributes:
        managers: The kinds of cache. The first one keeps all tokens, and its memory is the one that
            the counts of tokens measure.
        tree: The cached prefixes. Its kinds are `managers`.
        total_tokens: Number of tokens of usual texts that fit.
        shares_prefixes: Whether requests find the pages of others.
        pins_clock: The time by which prefixes are kept (`Holder.keep`).
    """

    def __init__(
        self,
        managers: Sequence[CacheManager],
        tree: RadixCache,
        *,
        page_size: int,
        total_tokens: int,
        share_prefixes: bool,
        pins_clock: Clock,
    ) -> None:
        self.managers, self.tree = managers, tree
        self.page_size = page_size
        self.total_tokens = total_tokens
        self.shares_prefixes = share_prefixes
        self.pins_clock = pins_clock
        self._room, self._are_several = managers[0].room, len(managers) > 1
        self._rooms: dict[Room, list[int]] = {}  # The numbers of the managers by their memory.
        for number, manager in enumerate(managers):
            self._rooms.setdefault(manager.room, []).append(number)

    @property
    def cached_tokens(self) -> int:
        """Number of cached tokens that no request uses."""
        return self._in_tokens(self._room.evictable)

    @property
    def used_tokens(self) -> int:
        """Number of tokens in pages that requests hold, alone or shared.

        If kinds of pages share memory, this is a share of the memory, in tokens of usual texts.
        """
        return self._in_tokens(self._room.total - self._room.free - self._room.evictable)

    @property
    def touched_tokens(self) -> int:
        """Tokens of pages that were used at least once, as a share of the memory."""
        slabs = self._room.slabs
        return -(-slabs.touched * self.total_tokens // slabs.count)

    @property
    def used_slots(self) -> int:
        """Number of slots that requests hold, without cached snapshots."""
        return sum(manager.slots[0] for manager in self.managers)

    @property
    def total_slots(self) -> int:
        """Number of slots, in kinds of cache where a request needs one."""
        return sum(manager.slots[1] for manager in self.managers)

    def attach(self, request: Holder) -> None:
        """Give a request without pages the cached prefix of its tokens.

        The last token is always computed, because its logits are wanted.
        """
        assert request.node is None
        # Log-probabilities of a prompt need the logits of every position.
        limit = 0 if request.prompt_logprobs_due else request.num_tokens - 1
        path, end = self.tree.match(request.names[:limit], request.namespace)
        columns: list[list[Any]] = [
            [block for node in path for block in node.columns[number]]
            for number in range(len(self.managers))
        ]
        end = self.resumable(columns, end)
        for manager, column in zip(self.managers, columns, strict=True):
            manager.attach(request, column, end)
        request.node = self.tree.cut(path, end)
        self.tree.lock(request.node)
        request.shared_pages, request.num_computed = end, end * self.page_size

    def resumable(self, columns: Sequence[list[Any]], end: int) -> int:
        """Return the longest prefix, in pages and at most `end`, that every kind can continue.

        `columns` are, by kind, the blocks of a prefix of at least `end` pages.
        """
        longer = None
        while end != longer:
            longer = end
            for manager, column in zip(self.managers, columns, strict=True):
                end = manager.resumable(column, end)
        return end

    def has_room(self, request: Holder, num_new: int, spare: int) -> bool:
        """Whether `num_new` more tokens fit, by eviction too, with `spare` pages left."""
        end = request.num_computed + num_new
        return self._fit([manager.demand(request, end, spare) for manager in self.managers])

    def limit(self, request: Holder, num_new: int) -> int:
        """Return how many of `num_new` tokens the next step takes."""
        if num_new > 1:
            for manager in self.managers:
                num_new = manager.limit(request, num_new)
        return num_new

    def reserve(self, request: Holder, num_new: int) -> bool:
        """Allocate memory for `num_new` more tokens, by eviction if needed.

        Return False if the tokens do not fit.
        """
        end, fits = request.num_computed + num_new, True
        if self._are_several:
            # If one kind does not fit, no kind evicts. A single manager checks this itself.
            fits = self._fit([manager.missing(request, end) for manager in self.managers])
        for manager in self.managers:
            fits = fits and manager.reserve(request, end)
        return fits

    def reserve_guesses(self, request: Holder, num_new: int, count: int) -> int:
        """Allocate memory for up to `count` guessed tokens after the `num_new` reserved ones.

        Return their number. `settle` must follow when the step is read.
        """
        end = request.num_computed + num_new
        for manager in self.managers:
            count = manager.guessable(request, end, count)
        if count and self.reserve(request, num_new + count):
            return count
        self._settle(request, all_right=True)
        return 0

    def settle(self, request: Holder, accepted: int, guessed: int) -> None:
        """Record that `accepted` of the `guessed` tokens of a step were right.

        Right tokens after which a kind of cache cannot continue are computed again.
        """
        if accepted:
            self.advance(request, accepted)
        self._settle(request, all_right=accepted == guessed)

    def _settle(self, request: Holder, *, all_right: bool) -> None:
        request.num_computed = min(
            manager.settle(request, all_right=all_right) for manager in self.managers
        )

    def next_prefix(self, request: Holder, num_new: int) -> int:
        """Return the end, in tokens, of the prefix that others can continue after the reserved
        step. 0 if there is none.
        """
        ends = [manager.next_prefix(request, num_new) for manager in self.managers]
        return max(ends) if all(ends) else 0

    def advance(self, request: Holder, num_new: int) -> None:
        """Record that the step with the `num_new` reserved tokens was launched.

        Computed pages of a prompt are shared at once: a request that finds them reads them in a
        later step, which the device runs after this one.
        """
        prefills = request.num_computed < request.num_prompt
        request.num_computed += num_new
        for manager in self.managers:
            manager.advance(request)
        if prefills:
            self._share(request)
            self._keep(request)

    def release(self, request: Holder) -> None:
        """Free everything that a request holds. Its computed pages stay cached until eviction."""
        if request.node is None:
            return
        self._share(request)
        self.tree.unlock(request.node)
        for manager in self.managers:
            manager.release(request)
        request.node = None
        request.shared_pages = request.num_computed = 0

    def flush(self) -> int:
        """Drop every prefix that no request uses, without copying it to tiers below.

        Return the number of tokens.
        """
        below, self.tree.below = self.tree.below, None
        freed = self.tree.evict(self.tree.evictable_pages)
        self.tree.below = below
        if self.tree.events is not None and freed and not self.tree.total_pages:
            self.tree.events.cleared()
        return freed * self.page_size

    def check(self, holders: Iterable[Holder]) -> None:
        """Assert that no block is leaked and that none has two owners.

        `holders` are all requests that may hold blocks.
        """
        holders = list(holders)
        nodes = list(self.tree.nodes())
        self.tree.check()
        for room in self._rooms:
            room.check()
        for number, manager in enumerate(self.managers):
            manager.check(holders, [block for node in nodes for block in node.columns[number]])

    def _fit(self, weights: list[int]) -> bool:
        """Whether the memory of each manager has so much weight that is free or evictable."""
        return all(
            room.has(sum(weights[number] for number in numbers))
            for room, numbers in self._rooms.items()
        )

    def _in_tokens(self, weight: int) -> int:
        """Convert a weight of memory into tokens of usual texts."""
        return -(-weight * self.total_tokens // self._room.total)

    def _share(self, request: Holder) -> None:
        """Put the computed whole pages of a request into the prefix tree and lock them."""
        tokens = request.names[: request.num_computed]
        whole = len(tokens) // self.page_size
        if not self.shares_prefixes or whole <= request.shared_pages:
            return
        path = self.tree.extend(tokens[: whole * self.page_size], request.namespace)
        begin = 0
        for node in path:
            if begin >= request.shared_pages:
                for manager, column in zip(self.managers, node.columns, strict=True):
                    manager.merge(request, begin, column)
                    for block, key in zip(column, node.keys, strict=False):
                        manager.name(block, key)
            begin += node.num_pages
        assert request.node is not None
        self.tree.lock(path[-1])
        self.tree.unlock(request.node)
        request.node, request.shared_pages = path[-1], whole

    def _keep(self, request: Holder) -> None:
        """Pin the prefixes that the client wants kept and that the tree has."""
        for tokens, seconds in request.keep:
            end = tokens // self.page_size
            if not 0 < end <= request.shared_pages:
                continue
            node = self.tree.cut(self.tree.path(request.node), end)
            self.tree.pin(node, seconds, request.client)
            path = self.tree.path(node)
            # The same prompt continues before its last token, a longer one behind it.
            first = min(end, (request.num_prompt - 1) // self.page_size)
            for number, manager in enumerate(self.managers):
                column = [block for node in path for block in node.columns[number]]
                manager.keep(column[manager.continues(first) :], seconds, request.client)
