"""Shared prefixes: a radix tree over token ids, whose nodes own pages of the KV cache.

The tree works in whole pages. A node holds n * page_size tokens and their n pages, and the children
of a node differ in their first page. A lock on a node holds all its ancestors too. Unlocked nodes
are evicted, least recently used first, from the leaves upwards.

A group of layers that needs only the end of a prefix has a column of blocks beside the pages, with
one block or hole per page. A recurrent state is stored beside the last page that it includes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

from .block_pool import HOLE, Block, BlockGroup
from .kv_events import KVEvents

Tokens = npt.NDArray[np.int64]
Column = dict[int, Block]  # A request's blocks of one group, by the index of the page.


class Node:
    """A run of tokens that continues its parent.

    `lock_count` counts the requests that use the node or a node below it. `hashes` are those of the
    pages; empty unless events are published.
    """

    __slots__ = (
        "children",
        "columns",
        "hashes",
        "last_used",
        "lock_count",
        "pages",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        tokens: Tokens,
        pages: list[int],
        columns: list[list[Block]],
        parent: Node | None,
    ) -> None:
        self.tokens = tokens
        self.pages = pages
        self.columns = columns
        self.hashes: list[int] = []
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_used = 0


class RadixCache:
    """Prefixes whose keys and values are in the cache.

    Attributes:
        free: Called with the pages that the tree evicts or does not need.
        enabled: If False, nothing is ever stored or found.
        groups: The groups of layers that have a column.
        events: Records the pages that enter and leave the tree.
        clock: Gives the times of uses, shared with the blocks of the groups.
    """

    def __init__(
        self,
        free: Callable[[Iterable[int]], None],
        page_size: int,
        *,
        enabled: bool = True,
        groups: Sequence[BlockGroup] = (),
        events: KVEvents | None = None,
        clock: Iterator[int] | None = None,
    ) -> None:
        self.root = Node(np.empty(0, np.int64), [], [[] for _ in groups], None)
        self._groups = groups
        self.evictable_pages = 0
        self.total_pages = 0
        self._free = free
        self._page_size = page_size
        self._enabled = enabled
        self.events = events
        self._clock = clock or count(1)
        self._ticket = count()
        # Heap of (last_used, ticket, node) of unlocked leaves. An entry is stale if the node was
        # used or locked since.
        self._idle: list[tuple[int, int, Node]] = []

    def match(self, tokens: Tokens) -> tuple[list[int], Node]:
        """Return the pages of the longest cached prefix of `tokens`, and the node where it ends."""
        node, pages, position = self.root, list[int](), 0
        while child := node.children.get(self._first_page(tokens, position)):
            shared = self._shared_pages(child, tokens, position)
            if shared < len(child.pages):
                child = self._split(child, shared)
            pages += child.pages
            position += shared * self._page_size
            node = child
            self._touch(node)
        return pages, node

    def resume(self, pages: list[int], node: Node) -> tuple[list[int], Node, list[list[Block]]]:
        """Shorten a match to the longest prefix that every group can continue.

        Return its pages, the node where it ends, and for each group the blocks of its last `span`
        pages.
        """
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        columns = [
            [block for part in reversed(path) for block in part.columns[number]]
            for number in range(len(self._groups))
        ]
        end = place = len(pages)
        longest = max(group.span for group in self._groups)
        while place > max(0, end - longest):
            place -= 1
            if any(
                place >= end - group.span and not column[place].number
                for column, group in zip(columns, self._groups, strict=True)
            ):
                end = place
        begin = len(pages)
        for part in path:
            begin -= len(part.pages)
            if begin < end:
                cut = end - begin
                node = part if cut == len(part.pages) else self._split(part, cut)
                break
        else:
            node = self.root
        ends = [
            column[max(0, end - group.span) : end]
            for column, group in zip(columns, self._groups, strict=True)
        ]
        return pages[:end], node, ends

    def insert(
        self, tokens: Tokens, pages: list[int], columns: Sequence[Column] = ()
    ) -> tuple[list[int], Node]:
        """Store the whole pages of `tokens`. Return the tree's pages for them and the last node.

        If the tree already has a prefix in other pages, the tree's pages stay and the caller's
        duplicates are freed. The caller must have locked the part of `pages` that came from the
        tree.

        `columns` has the caller's blocks of each group. Where the tree already has a block, the
        column gets the tree's block instead of the caller's.
        """
        if not self._enabled:
            return [], self.root
        whole = len(tokens) // self._page_size
        known, node = self.match(tokens[: whole * self._page_size])
        self._free(mine for mine, theirs in zip(pages, known, strict=False) if mine != theirs)
        rest = pages[len(known) : whole]
        if rest:
            run = tokens[len(known) * self._page_size : whole * self._page_size].copy()
            child = Node(run, rest, [[HOLE] * len(rest) for _ in self._groups], node)
            node.children[self._first_page(run, 0)] = child
            if self.events is not None:
                parent = node.hashes[-1] if node.hashes else None
                child.hashes = self.events.stored(parent, run, self._page_size)
            self.evictable_pages += len(rest)
            self.total_pages += len(rest)
            node = child
            self._touch(node)
        for number, (group, column) in enumerate(zip(self._groups, columns, strict=False)):
            self._keep(group, number, column, node, whole)
        return known + rest, node

    def lock(self, node: Node) -> None:
        """Protect all nodes from the root to `node` from eviction."""
        while node.parent is not None:
            if node.lock_count == 0:
                self.evictable_pages -= len(node.pages)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            assert node.lock_count > 0, "unlocked more often than locked"
            node.lock_count -= 1
            if node.lock_count == 0:
                self.evictable_pages += len(node.pages)
                self._touch(node)
            node = node.parent

    def evict(self, count: int) -> int:
        """Evict up to `count` pages that no request uses. Return the number of pages evicted."""
        freed = 0
        while freed < count and self.oldest is not None:
            freed += self.evict_oldest(count - freed)
        return freed

    @property
    def oldest(self) -> int | None:
        """Time of the last use of the node that is evicted next; None if there is none."""
        while self._idle:
            last_used, _, node = self._idle[0]
            if node.last_used == last_used and self._is_idle(node):
                return last_used
            heapq.heappop(self._idle)
        return None

    def evict_oldest(self, count: int) -> int:
        """Evict up to `count` pages of that node, which must exist. Return their number."""
        _, _, node = heapq.heappop(self._idle)
        take = min(len(node.pages), count)
        self._drop_tail(node, take)
        return take

    def nodes(self) -> Iterator[Node]:
        """Yield every node except the root, for checks."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _first_page(self, tokens: Tokens, position: int) -> bytes:
        page = tokens[position : position + self._page_size]
        return page.tobytes() if len(page) == self._page_size else b""

    def _shared_pages(self, node: Node, tokens: Tokens, position: int) -> int:
        """Number of leading pages of `node` that equal the tokens from `position` on.

        It is at least 1, because the first page was the key of the node.
        """
        there = tokens[position : position + len(node.tokens)]
        differs = np.flatnonzero(node.tokens[: len(there)] != there)
        same = int(differs[0]) if len(differs) else len(there)
        return same // self._page_size

    def _keep(self, group: BlockGroup, number: int, column: Column, node: Node, end: int) -> None:
        """Store the blocks of a column in the tree's holes, up to page `end`, where `node` ends."""
        left = sorted(place for place in column if place < end)
        while left:
            begin = end - len(node.pages)
            while left and left[-1] >= begin:
                place = left.pop()
                mine, theirs = column[place], node.columns[number][place - begin]
                if not theirs.number:
                    node.columns[number][place - begin], mine.kept = mine, True
                elif theirs is not mine:
                    group.blocks.hold(theirs)
                    group.blocks.let_go(mine)
                    column[place] = theirs
            end = begin
            if left:
                assert node.parent is not None
                node = node.parent

    def _split(self, node: Node, pages: int) -> Node:
        """Split a node after its first `pages` pages. Return the new node above it."""
        cut = pages * self._page_size
        parent = node.parent
        assert parent is not None
        above = [column[:pages] for column in node.columns]
        upper = Node(node.tokens[:cut], node.pages[:pages], above, parent)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        parent.children[self._first_page(upper.tokens, 0)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], upper
        node.columns = [column[pages:] for column in node.columns]
        upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        upper.children[self._first_page(node.tokens, 0)] = node
        return upper

    def _touch(self, node: Node) -> None:
        if node.parent is None:
            return
        node.last_used = next(self._clock)
        if self._is_idle(node):
            self._push_idle(node)

    def _is_idle(self, node: Node) -> bool:
        return node.lock_count == 0 and not node.children and bool(node.pages)

    def _push_idle(self, node: Node) -> None:
        heapq.heappush(self._idle, (node.last_used, next(self._ticket), node))
        if len(self._idle) > 64 and len(self._idle) > 4 * self.total_pages:
            self._idle = [
                entry
                for entry in self._idle
                if entry[2].last_used == entry[0] and self._is_idle(entry[2])
            ]
            heapq.heapify(self._idle)

    def _drop_tail(self, node: Node, pages: int) -> None:
        """Free the last `pages` pages of an idle leaf. An empty leaf is removed from the tree,
        which may make its parent idle.
        """
        self._free(node.pages[-pages:])
        self.evictable_pages -= pages
        self.total_pages -= pages
        parent = node.parent
        assert parent is not None
        key = self._first_page(node.tokens, 0)
        del node.pages[-pages:]
        if self.events is not None:
            self.events.removed(node.hashes[-pages:])
            del node.hashes[-pages:]
        for group, column in zip(self._groups, node.columns, strict=True):
            for block in column[-pages:]:
                group.blocks.forget(block)
            del column[-pages:]
        node.tokens = node.tokens[: len(node.pages) * self._page_size]
        if node.pages:
            self._push_idle(node)
            return
        del parent.children[key]
        if parent.parent is not None and self._is_idle(parent):
            self._push_idle(parent)
