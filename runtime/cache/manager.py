"""The interface of a kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .holder import Holder
from .room import Room


class CacheManager(Protocol):
    """What layers of one kind keep of requests and of cached prefixes.

    The prefix tree has a column for each manager, with one block per page of tokens. What a block
    is, only its manager knows. A column has `hole` where the manager keeps nothing.

    `KVCache` asks all managers of a model alike, so none of its callers knows the kinds:

        end = the longest cached prefix that no manager's `resumable` shortens
        manager.attach(request, column, end)          # A request begins behind that prefix.
        num_new = manager.limit(request, num_new)     # A step is planned …
        manager.missing(request, end)                 # … is checked to fit in all kinds …
        manager.reserve(request, end)                 # … and gets its memory.
        manager.guessable(request, end, count)        # Tokens that may be wrong follow.
        manager.advance(request)                      # The step is launched.
        manager.settle(request, all_right=True)       # It is read, if it had guesses.
        manager.merge(request, begin, column)         # Computed pages enter the tree.
        manager.release(request)                      # The request ended or was preempted.
        manager.forget(blocks)                        # The tree evicted pages.

    A new kind is a file with a subclass, which `kinds.make_cache` adds to the models that have the
    kind. The defaults are those of a kind that keeps all tokens of a request.

    Attributes:
        room: The memory of the blocks. Several kinds may share it.
        hole: What a column holds where a block is missing.
    """

    room: Room
    hole: Any
    page_size: int

    @property
    def slots(self) -> tuple[int, int]:
        """Numbers of blocks that requests hold, and of all, if each request needs exactly one.

        (0, 0) for kinds that need more memory the longer a request is.
        """
        return 0, 0

    def resumable(self, column: list[Any], end: int) -> int:
        """Return the longest prefix that a request can continue, in pages, at most `end`.

        `column` has the blocks of a cached prefix of at least `end` pages.
        """
        return end

    def attach(self, request: Holder, column: list[Any], end: int) -> None:
        """Give a request without blocks the first `end` pages of a cached prefix."""

    def demand(self, request: Holder, end: int, spare: int) -> int:
        """Weight of the memory that `end` tokens need beyond what the request holds.

        `spare` counts requests that may need one more page meanwhile.
        """

    def limit(self, request: Holder, num_new: int) -> int:
        """Return how many of `num_new` tokens the next step takes: at least one."""
        return num_new

    def missing(self, request: Holder, end: int) -> int:
        """Free the blocks that no later step needs. Return the weight that `reserve` allocates.

        The next step computes the tokens from `num_computed` to `end`.
        """

    def reserve(self, request: Holder, end: int) -> bool:
        """Allocate blocks for all tokens before `end`, by eviction if needed.

        Return False if the blocks do not fit.
        """

    def next_prefix(self, request: Holder, num_new: int) -> int:
        """Return the end of the first prefix that others can continue after the reserved step.

        0 if there is none.
        """
        return request.num_computed + self.page_size

    def advance(self, request: Holder) -> None:
        """Record that the reserved step was launched. `num_computed` includes its tokens."""
        return None

    def guessable(self, request: Holder, end: int, count: int) -> int:
        """Return how many of `count` guessed tokens after `end` the next step may compute, and
        prepare for their removal.
        """
        return count

    def settle(self, request: Holder, *, all_right: bool) -> int:
        """End what `guessable` prepared. The guesses that the step computed are right, or some of
        them are not.

        Return the first token that the next step must compute; `num_computed` for kinds whose
        blocks of right tokens stay valid beside wrong ones.
        """
        return request.num_computed

    def merge(self, request: Holder, begin: int, column: list[Any]) -> None:
        """Exchange computed blocks with a node of the prefix tree.

        `column` belongs to the pages from `begin` on, of which the tree lent none to the request.
        Holes are filled with the request's blocks. Where both have a block, the request uses the
        tree's block instead of its own.
        """

    def number(self, block: Any) -> int:
        """Return the number of a block's memory; 0 for a hole."""

    def continues(self, end: int) -> int:
        """Return the first page whose block is read by a request that continues `end` pages."""
        return 0

    def keep(self, blocks: list[Any], seconds: float, client: str) -> None:
        """Evict these blocks of a column after others, if memory is needed meanwhile (`Pins`)."""
        return None

    def allocate(self, count: int) -> list[Any] | None:
        """Allocate blocks that the tree owns from now on. None if they do not fit."""

    def name(self, block: Any, key: bytes) -> None:
        """Give a block of the tree the key of its page in the tiers below."""
        return None

    def save_by(self, save: Callable[[bytes, int], None]) -> None:
        """Call `save` with key and number of blocks that are evicted before their page."""
        return None

    def forget(self, blocks: list[Any]) -> None:
        """Free blocks that the tree evicted. No request uses these pages of the tree."""

    def release(self, request: Holder) -> None:
        """Free what a request holds. Blocks of the tree stay cached."""

    def check(self, holders: Iterable[Holder], cached: list[Any]) -> None:
        """Assert that no block is lost and that none has two owners.

        `holders` are all requests that may hold blocks. `cached` are all blocks of the tree.
        """
