"""Blocks that a cached prefix may lose: pages of sliding windows and slots of recurrent states.

A request needs them only where it continues a prefix. The prefix tree therefore keeps them until
their memory is needed. An evicted block leaves a hole in the tree. Pinned blocks are evicted after
all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from .pins import LAST, Clock, Pins
from .room import Room
from .slabs import ALONE, PageAllocator, PageKind


class Block:
    """One page or slot.

    Attributes:
        number: The number of the page or slot; 0 after eviction.
        holders: Number of requests that use the block.
        kept: Whether the prefix tree, or a request that can do without it, caches the block.
        last_used: Time of the last use by the pool's clock, if no request holds the block.
        key: Key of the block's page in the tiers below; empty without such tiers.
    """

    num_pages = 1
    __slots__ = ("holders", "kept", "key", "last_used", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders = 1
        self.kept = False
        self.last_used = 0
        self.key = b""


HOLE = Block(0)  # Stands for a block that was evicted or never existed.


class BlockPool:
    """Allocates blocks. Evicts blocks that are cached but not held, least recently used first.

    `clock` gives the times of uses; pools that share it can be compared.

    Attributes:
        save: Called before a block with a key is evicted, to copy it.
    """

    save: Callable[[bytes, int], None] | None = None

    def __init__(
        self,
        room: Room,
        kind: PageKind = ALONE,
        clock: Iterator[int] | None = None,
        pins_clock: Clock | None = None,
    ) -> None:
        self.room, self.allocator = room, PageAllocator(room.slabs, kind)
        self._clock = clock or count(1)
        self._idle: OrderedDict[Block, None] = OrderedDict()
        # Pinned blocks are put aside once they are the oldest idle ones.
        self._aside: OrderedDict[Block, None] = OrderedDict()
        self._pins: Pins[Block] = Pins(self.size // 2, pins_clock or Clock())
        room.add(self)

    @property
    def size(self) -> int:
        """Number of blocks that fit, if no other kind uses the memory."""
        return self.room.slabs.count * self.allocator.kind.per_slab

    @property
    def evictable(self) -> int:
        """Number of blocks that can be evicted."""
        return len(self._idle) + len(self._aside)

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be evicted, not counting those of other kinds."""
        return self.allocator.free_pages + self.evictable

    @property
    def oldest(self) -> int | None:
        """Time of the last use of the block that is evicted next; None if there is none.

        Pinned blocks seem to have been used later than all others.
        """
        for block in reversed(self._pins.ended()):
            if block in self._aside:
                del self._aside[block]
                self._idle[block] = None
                self._idle.move_to_end(block, last=False)
        while self._idle and (block := next(iter(self._idle))) in self._pins:
            self._aside[block] = self._idle.pop(block)
        if self._idle:
            return next(iter(self._idle)).last_used
        return LAST + next(iter(self._aside)).last_used if self._aside else None

    def allocate(self, count: int) -> list[Block] | None:
        """Allocate `count` blocks with one holder each. None if they do not fit."""
        numbers = self.room.allocate(self, count)
        return None if numbers is None else [Block(number) for number in numbers]

    def evict_oldest(self, most: int) -> None:
        """Evict the block at the time `oldest`: no two blocks have the same."""
        block, _ = (self._idle or self._aside).popitem(last=False)
        if self.save is not None and block.key:
            self.save(block.key, block.number)
        self._evict(block)

    def hold(self, block: Block) -> None:
        """Add a holder. The block must not have been evicted."""
        assert block.number
        block.holders += 1
        self._leave_idle(block)

    def let_go(self, block: Block) -> None:
        """Remove a holder. Does nothing for a hole."""
        if not block.number:
            return
        block.holders -= 1
        assert block.holders >= 0, "a block is released more often than held"
        if block.holders == 0:
            if block.kept:
                block.last_used = next(self._clock)
                self._idle[block] = None
            else:
                self._evict(block)

    def touch(self, block: Block) -> None:
        """Record a use of an idle block."""
        if block in self._idle:
            block.last_used = next(self._clock)
            self._idle.move_to_end(block)

    def offer(self, block: Block) -> None:
        """Turn the only holder's block into a cached one, which may be evicted."""
        block.kept = True
        self.let_go(block)

    def forget(self, blocks: list[Block]) -> None:
        """Stop caching blocks. Holes are skipped."""
        for block in blocks:
            if block.number:
                block.kept = False
                if block.holders == 0:
                    self._leave_idle(block)
                    self._evict(block)

    def keep(self, block: Block, seconds: float, client: str) -> None:
        """Evict a cached block after others, if memory is needed meanwhile."""
        if block.number:
            self._pins.keep(block, seconds, client)

    def _leave_idle(self, block: Block) -> None:
        self._idle.pop(block, None)
        self._aside.pop(block, None)

    def _evict(self, block: Block) -> None:
        self._pins.drop(block)
        self.allocator.free([block.number])
        block.number, block.kept = 0, False

    def check(self, held: list[Block], kept: list[Block]) -> None:
        """Assert that holders are counted rightly and that no block is lost.

        `held` has one entry per holder. `kept` are the cached blocks, holes included.
        """
        kept = [block for block in kept if block.number]
        assert all(block.kept for block in kept) and len(set(kept)) == len(kept)
        assert all(block.number for block in held), "a request holds a block that was evicted"
        holders = dict.fromkeys(kept, 0)
        for block in held:
            holders[block] = holders.get(block, 0) + 1
        assert all(block.holders == count for block, count in holders.items())
        assert all(block.kept == (block in set(kept)) for block in holders)
        numbers = [block.number for block in holders]
        assert len(numbers) == len(set(numbers)), "two blocks have one place"
        assert set(numbers) == self.allocator.owned(), "a block is lost"
        idle = [*self._idle, *self._aside]
        assert len(set(idle)) == len(idle)
        assert set(idle) == {block for block in kept if not block.holders}


def end_of_run(column: list[Block], end: int, span: int) -> int:
    """Return the longest prefix of at most `end` pages whose last `span` pages have blocks.

    Prefixes of less than `span` pages need blocks for all of their pages.
    """
    place = end
    while place > max(0, end - span):
        place -= 1
        if not column[place].number:
            end = place
    return end
