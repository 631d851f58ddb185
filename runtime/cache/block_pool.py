"""Blocks that a prefix may lose: pages of sliding windows and slots of recurrent states.

Of a cached prefix they are wanted only where a request may go on behind it. So the prefix tree
keeps them as long as nobody needs the room, and one that is taken back leaves a hole in the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from .slabs import PageAllocator


class Block:
    """One page or slot. `number`: which; 0: it was taken back. `holders`: requests that use it;
    `kept`: whether the prefix tree has it, or a request that would miss it but can do without.
    `last_used`: when it was, by the pool's clock, if nobody holds it.
    """

    __slots__ = ("holders", "kept", "last_used", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders = 1
        self.kept = False
        self.last_used = 0


HOLE = Block(0)
"""In the place of one that is not there."""


class BlockPool:
    """Blocks of an allocator's, and those that are kept but not held, which are taken back least
    recently used first. `clock` orders uses, also beside those of others.
    """

    def __init__(self, allocator: PageAllocator, clock: Iterator[int] | None = None) -> None:
        self.allocator = allocator
        self._clock = clock or count(1)
        self._idle: OrderedDict[Block, None] = OrderedDict()

    @property
    def size(self) -> int:
        """Blocks that there are room for, where nothing else takes it."""
        return self.allocator.source.count * self.allocator.kind.per_slab

    @property
    def idle(self) -> int:
        """Blocks that can be taken back."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that are free or can be made so."""
        return self.allocator.free_pages + len(self._idle)

    @property
    def oldest(self) -> int | None:
        """When the one that is taken back next was used; None: there is none."""
        return next(iter(self._idle)).last_used if self._idle else None

    def allocate(self, count: int) -> list[Block] | None:
        """`count` blocks, held once each; None where fewer are available."""
        if count > self.available:
            return None
        while self.allocator.free_pages < count:
            self.take_oldest()
        numbers = self.allocator.allocate(count)
        assert numbers is not None
        return [Block(number) for number in numbers]

    def take_oldest(self) -> None:
        """Take back the least recently used that nobody holds; there must be one."""
        self._take_back(self._idle.popitem(last=False)[0])

    def hold(self, block: Block) -> None:
        """One more request uses it; it must not have been taken back."""
        assert block.number
        block.holders += 1
        self._idle.pop(block, None)

    def let_go(self, block: Block) -> None:
        """A request uses it no more. A hole may be let go of too."""
        if not block.number:
            return
        block.holders -= 1
        assert block.holders >= 0, "a block is let go of more often than held"
        if block.holders == 0:
            if block.kept:
                block.last_used = next(self._clock)
                self._idle[block] = None
            else:
                self._take_back(block)

    def touch(self, block: Block) -> None:
        """It was used just now."""
        if block in self._idle:
            block.last_used = next(self._clock)
            self._idle.move_to_end(block)

    def offer(self, block: Block) -> None:
        """Its one holder keeps it as long as nobody needs the room."""
        block.kept = True
        self.let_go(block)

    def reclaim(self, block: Block) -> bool:
        """Its keeper holds it again; False where it was taken back."""
        if not block.number:
            return False
        self.hold(block)
        block.kept = False
        return True

    def forget(self, block: Block) -> None:
        """It is kept no more. May be a hole."""
        block.kept = False
        if block.number and block.holders == 0:
            del self._idle[block]
            self._take_back(block)

    def _take_back(self, block: Block) -> None:
        self.allocator.free([block.number])
        block.number, block.kept = 0, False

    def check(self, held: list[Block], kept: list[Block]) -> None:
        """Assert that each block has the holders it counts, and that none is lost. `held`: by
        requests, one entry a holder; `kept`: by the tree or a request, holes among them.
        """
        kept = [block for block in kept if block.number]
        assert all(block.kept for block in kept) and len(set(kept)) == len(kept)
        assert all(block.number for block in held), "a request holds a block that was taken back"
        holders = dict.fromkeys(kept, 0)
        for block in held:
            holders[block] = holders.get(block, 0) + 1
        assert all(block.holders == count for block, count in holders.items())
        assert all(block.kept == (block in set(kept)) for block in holders)
        numbers = [block.number for block in holders]
        assert len(numbers) == len(set(numbers)), "two blocks have one place"
        assert set(numbers) == self.allocator.owned(), "a block is lost"
        assert set(self._idle) == {block for block in kept if not block.holders}


class BlockGroup(NamedTuple):
    """Layers that go on from the end of a prefix alone: those of a sliding window, or with a
    recurrent state. Of the last `span` pages each must have its block.
    """

    blocks: BlockPool
    span: int
