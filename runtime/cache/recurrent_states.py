"""Slots of layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.padding import RESERVED_SLOT
from .block_pool import HOLE, Block, BlockPool, end_of_run
from .holder import Holder
from .manager import CacheManager


class RecurrentStates(CacheManager):
    """A request holds one slot. Its state changes with every token.

    A prefix can be continued if the tree has a snapshot of the state at its end, which is stored
    beside the last page of the prefix. A snapshot is taken at the page border where a prompt ends,
    and where the prompt leaves a known prefix, if at least `snapshot_tokens` tokens are new.
    `snapshot_tokens` is None if prefixes are not shared.

    A wrong token cannot be taken out of a state. A step that verifies guesses therefore copies the
    state first, into a second slot. If a guess is wrong, the request continues from that copy, and
    its next step computes the right tokens again.
    """

    hole = HOLE

    def __init__(self, blocks: BlockPool, snapshot_tokens: int | None, page_size: int) -> None:
        self.room, self._blocks = blocks.room, blocks
        self._snapshot_tokens, self.page_size = snapshot_tokens, page_size

    @property
    def slots(self) -> tuple[int, int]:
        return self._blocks.size - self._blocks.available, self._blocks.size

    def resumable(self, column: list[Block], end: int) -> int:
        return end_of_run(column, end, 1)

    def attach(self, request: Holder, column: list[Block], end: int) -> None:
        request.branch, request.saved_at = len(column) * self.page_size, end * self.page_size
        last = column[end - 1] if end else HOLE
        self._blocks.touch(last)
        request.state_source = last.number if end else RESERVED_SLOT

    def demand(self, request: Holder, end: int, spare: int) -> int:
        return self.room.weight(self._blocks, 1 if request.state is None else 0)

    def limit(self, request: Holder, num_new: int) -> int:
        """The step ends where a snapshot is wanted, or, inside a prompt, at a page border, where a
        snapshot is possible.
        """
        begin, end = request.num_computed, request.num_computed + num_new
        if self._snapshot_tokens is None or begin >= request.num_prompt:
            return num_new
        for border in sorted(self._borders(request)):
            if begin < border < end and border - request.saved_at >= self._snapshot_tokens:
                return border - begin
        border = end // self.page_size * self.page_size
        return border - begin if begin < border and end < request.num_tokens else num_new

    def missing(self, request: Holder, end: int) -> int:
        return self.demand(request, end, 0)

    def reserve(self, request: Holder, end: int) -> bool:
        if request.state is None:
            blocks = self._blocks.allocate(1)
            if blocks is None:
                return False
            (request.state,) = blocks
        # A repeated plan may end at another token.
        self._blocks.let_go(request.snapshot or HOLE)
        request.snapshot = None
        if (
            self._snapshot_tokens is not None
            # The state after guesses is not known to be right.
            and request.before is None
            and end % self.page_size == 0
            and end - request.saved_at >= self._snapshot_tokens
            and self._is_wanted(request, end)
        ):
            blocks = self._blocks.allocate(1)
            request.snapshot = blocks[0] if blocks else None
        return True

    def next_prefix(self, request: Holder, num_new: int) -> int:
        return 0 if request.snapshot is None else request.num_computed + num_new

    def advance(self, request: Holder) -> None:
        request.state_source = None
        if request.snapshot is not None:
            self._blocks.forget([request.saved or HOLE])
            self._blocks.offer(request.snapshot)
            request.saved, request.snapshot = request.snapshot, None
            request.saved_at = request.num_computed

    def guessable(self, request: Holder, end: int, count: int) -> int:
        """Guesses end before the page border where a snapshot is wanted, so that a step without
        guesses ends there.
        """
        if request.snapshot is not None:
            return 0
        if self._snapshot_tokens is not None:
            least = max(end + 1, request.saved_at + self._snapshot_tokens)
            count = min(count, -(-least // self.page_size) * self.page_size - 1 - end)
        if count and request.before is None:
            blocks = self._blocks.allocate(1)
            if blocks is None:
                return 0
            (request.before,) = blocks
        request.before_at = request.num_computed
        return count

    def settle(self, request: Holder, *, all_right: bool) -> int:
        if request.before is None:
            return request.num_computed
        if not all_right:
            request.state, request.before = request.before, request.state
        self._blocks.let_go(request.before)
        request.before = None
        return request.num_computed if all_right else request.before_at

    def merge(self, request: Holder, begin: int, column: list[Block]) -> None:
        place = request.saved_at // self.page_size - 1 - begin
        if request.saved is None or not 0 <= place < len(column):
            return
        if request.saved.number:
            if column[place].number:
                self._blocks.forget([request.saved])
            else:
                column[place] = request.saved
            self._blocks.touch(column[place])
        request.saved = None

    def number(self, block: Block) -> int:
        return block.number

    def continues(self, end: int) -> int:
        return max(0, end - 1)

    def keep(self, blocks: list[Block], seconds: float, client: str) -> None:
        for block in blocks:
            self._blocks.keep(block, seconds, client)

    def allocate(self, count: int) -> list[Block] | None:
        blocks = self._blocks.allocate(count)
        for block in blocks or ():
            self._blocks.offer(block)
        return blocks

    def name(self, block: Block, key: bytes) -> None:
        if block.number:
            block.key = key

    def save_by(self, save: Callable[[bytes, int], None]) -> None:
        self._blocks.save = save

    def forget(self, blocks: list[Block]) -> None:
        self._blocks.forget(blocks)

    def release(self, request: Holder) -> None:
        self._blocks.forget([request.saved or HOLE])
        self._blocks.let_go(request.state or HOLE)
        self._blocks.let_go(request.snapshot or HOLE)
        self._blocks.let_go(request.before or HOLE)
        request.state = request.snapshot = request.saved = request.state_source = None
        request.before = None

    def check(self, holders: Iterable[Holder], cached: list[Block]) -> None:
        held, saved = list[Block | None](), list[Block | None](cached)
        for request in holders:
            held += [request.state, request.snapshot, request.before]
            saved.append(request.saved)
        self._blocks.check([each for each in held if each], [each for each in saved if each])

    def _borders(self, request: Holder) -> list[int]:
        """Ends of prefixes that another prompt may continue, in tokens: where this prompt leaves
        the tree, the ends that the client wants kept, and its last whole page.
        """
        ends = [request.num_tokens - 1, *(end for end, _ in request.keep)]
        return [request.branch, *(end // self.page_size * self.page_size for end in ends)]

    def _is_wanted(self, request: Holder, end: int) -> bool:
        """Whether a snapshot after `end` tokens is worth a slot.

        In a long prompt only chunks at doubling distances are, otherwise the snapshots of one
        prompt would evict those of others.
        """
        is_chunk = end < request.num_prompt and end not in self._borders(request)
        return not is_chunk or end >= 2 * request.saved_at
