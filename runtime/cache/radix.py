"""Shared prefixes: a radix tree over token ids, whose nodes own blocks of the caches.

The tree works in whole pages. A node holds n * page_size tokens, and the children of a node differ
in their first page. A lock on a node holds all its ancestors too. Unlocked nodes are evicted, least
recently used first, from the leaves upwards, and pinned ones after all others.

Each kind of cache has a column of blocks in a node, with one block or hole per page.

Prefixes of different namespaces have no node in common: equal tokens have other keys and values
there, or belong to a client that must not notice what others have cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .pins import LAST, Clock, Pins

Tokens = npt.NDArray[np.int64]


class Kind(Protocol):
    """What the tree needs of a kind of cache; `manager.CacheManager` describes it."""

    hole: Any

    def forget(self, blocks: list[Any]) -> None: ...


class Events(Protocol):
    """Hears which pages enter and leave the tree. `kv_events.KVEvents` implements it."""

    def stored(
        self,
        parent: int | None,
        tokens: Tokens,
        page_size: int,
        namespace: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Return a hash for each page of `tokens`, which follow the page with the hash `parent`."""

    def removed(self, hashes: list[int]) -> None: ...

    def cleared(self) -> None: ...


class LowerTier(Protocol):
    """Keeps what the tree evicts. `runtime.tiers.tiers` implements it."""

    def keys(self, parent: bytes | None, tokens: Tokens, namespace: bytes) -> list[bytes]:
        """Return a key for each whole page of `tokens`, which follow the page of `parent`."""

    def evicted(self, keys: list[bytes], columns: list[list[Any]]) -> None:
        """Copy pages that leave the tree: their keys and, by kind of cache, their blocks."""


class Node:
    """A run of tokens that continues its parent.

    Attributes:
        key: The first page, by which the parent finds the node. The namespace precedes it below the
            root.
        num_pages: Number of pages that hold the tokens.
        columns: By kind of cache, a block or a hole for each page.
        hashes: Block hashes of the pages; empty unless events are published.
        keys: Keys of the pages in the tiers below; empty without such tiers.
        lock_count: Number of requests that use the node or a node below it.
        last_used: Time of the last use.
    """

    __slots__ = (
        "children",
        "columns",
        "hashes",
        "key",
        "keys",
        "last_used",
        "lock_count",
        "num_pages",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        key: bytes,
        tokens: Tokens,
        num_pages: int,
        columns: list[list[Any]],
        parent: Node | None,
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.num_pages = num_pages
        self.columns = columns
        self.hashes: list[int] = []
        self.keys: list[bytes] = []
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_used = 0


# The time of a leaf's last use, a number that differs, and the leaf. The entry is stale if the leaf
# was used, locked or evicted since.
_Entry = tuple[int, int, Node]


class RadixCache:
    """The prefixes that are in the caches of all `kinds`.

    Attributes:
        kinds: The kinds of cache, in the order of the columns. They must not change once the tree
            has a node.
        events: Records the pages that enter and leave the tree.
        clock: Gives the times of uses, shared with kinds that evict from the same memory.
        below: Gets what is evicted, or None.
        changes: Counts the nodes that were added.
        pins: The nodes that clients want kept.
    """

    below: LowerTier | None = None

    def __init__(
        self,
        page_size: int,
        kinds: Sequence[Kind],
        *,
        events: Events | None = None,
        clock: Iterator[int] | None = None,
        pins: Pins[Node] | None = None,
    ) -> None:
        self.root = Node(b"", np.empty(0, np.int64), 0, [], None)
        self.evictable_pages = 0
        self.total_pages = self.changes = 0
        self._page_size = page_size
        self._kinds = kinds
        self.events = events
        self._clock = clock or count(1)
        self._ticket = count()
        self.pins: Pins[Node] = pins or Pins(0, Clock())
        # Heaps of unlocked leaves. Pinned leaves are put aside once they are the oldest ones.
        self._idle: list[_Entry] = []
        self._aside: list[_Entry] = []

    def match(self, tokens: Tokens, namespace: bytes = b"") -> tuple[list[Node], int]:
        """Return the nodes of the longest cached prefix of `tokens`, and its number of pages."""
        node, path, position = self.root, list[Node](), 0
        while child := node.children.get(self._key(tokens, position, namespace)):
            shared = self._shared_pages(child, tokens, position)
            node = child if shared == child.num_pages else self._split(child, shared)
            position += shared * self._page_size
            path.append(node)
            self._touch(node)
        return path, position // self._page_size

    def cut(self, path: list[Node], end: int) -> Node:
        """Return the node of `path` that ends after `end` pages. If needed, split one there."""
        node = self.root
        for node in path:
            if end <= node.num_pages:
                break
            end -= node.num_pages
        if not end:
            return self.root
        return node if end == node.num_pages else self._split(node, end)

    @staticmethod
    def path(node: Node | None) -> list[Node]:
        """Return the nodes below the root that lead to `node`."""
        found: list[Node] = []
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def extend(self, tokens: Tokens, namespace: bytes = b"") -> list[Node]:
        """Store `tokens`, which must be whole pages. Return the nodes that hold them.

        If the last node is new, its columns are holes, which the caller fills at once. The caller
        must have locked all other nodes that it uses.
        """
        path, known = self.match(tokens, namespace)
        run = tokens[known * self._page_size :].copy()
        if num_pages := len(run) // self._page_size:
            parent = path[-1] if path else self.root
            columns = [[kind.hole] * num_pages for kind in self._kinds]
            key = self._key(tokens, known * self._page_size, namespace)
            node = parent.children[key] = Node(key, run, num_pages, columns, parent)
            if self.below is not None:
                last = parent.keys[-1] if parent.keys else None
                node.keys = self.below.keys(last, run, namespace)
            if self.events is not None:
                before = parent.hashes[-1] if parent.hashes else None
                node.hashes = self.events.stored(before, run, self._page_size, namespace, node.keys)
            self.evictable_pages += num_pages
            self.total_pages += num_pages
            self.changes += 1
            self._touch(node)
            path.append(node)
        return path

    def lock(self, node: Node) -> None:
        """Protect all nodes from the root to `node` from eviction."""
        while node.parent is not None:
            if node.lock_count == 0:
                self.evictable_pages -= node.num_pages
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            assert node.lock_count > 0, "unlocked more often than locked"
            node.lock_count -= 1
            if node.lock_count == 0:
                self.evictable_pages += node.num_pages
                self._touch(node)
            node = node.parent

    def pin(self, node: Node, seconds: float, client: str) -> None:
        """Evict all nodes from the root to `node` after others, if memory is needed meanwhile."""
        while node.parent is not None:
            self.pins.keep(node, seconds, client)
            node = node.parent

    def evict(self, count: int) -> int:
        """Evict up to `count` pages that no request uses. Return the number of pages evicted."""
        freed = 0
        while freed < count and self.oldest is not None:
            freed += self.evict_oldest(count - freed)
        return freed

    @property
    def oldest(self) -> int | None:
        """Time of the last use of the node that is evicted next; None if there is none.

        Pinned nodes seem to have been used later than all others.
        """
        for node in self.pins.ended():
            if self._is_idle(node):
                self._push_idle(node)
        while (first := self._first(self._idle)) is not None and first in self.pins:
            heapq.heappush(self._aside, heapq.heappop(self._idle))
        if first is not None:
            return first.last_used
        pinned = self._first(self._aside)
        return None if pinned is None else LAST + pinned.last_used

    def evict_oldest(self, count: int) -> int:
        """Evict up to `count` pages of the node of `oldest`, which must exist. Return their
        number.
        """
        _, _, node = heapq.heappop(self._idle or self._aside)
        take = min(node.num_pages, count)
        self._drop_tail(node, take)
        return take

    def check(self) -> None:
        """Assert that the counts of pages are right and that columns are whole."""
        nodes = list(self.nodes())
        assert self.total_pages == sum(node.num_pages for node in nodes)
        assert self.evictable_pages == sum(node.num_pages for node in nodes if node.lock_count == 0)
        assert all(len(column) == node.num_pages for node in nodes for column in node.columns)
        assert self.pins.pages == sum(node.num_pages for node in self.pins)
        assert set(self.pins) <= set(nodes), "a node is pinned after its eviction"

    def nodes(self) -> Iterator[Node]:
        """Yield every node except the root, for checks."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _key(self, tokens: Tokens, position: int, namespace: bytes = b"") -> bytes:
        page = tokens[position : position + self._page_size]
        if len(page) < self._page_size:
            return b""
        return page.tobytes() if position else namespace + page.tobytes()

    def _shared_pages(self, node: Node, tokens: Tokens, position: int) -> int:
        """Number of leading pages of `node` that equal the tokens from `position` on.

        It is at least 1, because the first page was the key of the node.
        """
        there = tokens[position : position + len(node.tokens)]
        differs = np.flatnonzero(node.tokens[: len(there)] != there)
        same = int(differs[0]) if len(differs) else len(there)
        return same // self._page_size

    def _split(self, node: Node, pages: int) -> Node:
        """Split a node after its first `pages` pages. Return the new node above it."""
        cut = pages * self._page_size
        parent = node.parent
        assert parent is not None
        above = [column[:pages] for column in node.columns]
        upper = Node(node.key, node.tokens[:cut], pages, above, parent)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        parent.children[upper.key] = upper
        node.tokens, node.num_pages, node.parent = node.tokens[cut:], node.num_pages - pages, upper
        node.columns = [column[pages:] for column in node.columns]
        upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        node.key = self._key(node.tokens, 0)
        upper.children[node.key] = node
        self.pins.inherit(upper, node)
        return upper

    def _touch(self, node: Node) -> None:
        if node.parent is None:
            return
        node.last_used = next(self._clock)
        if self._is_idle(node):
            self._push_idle(node)

    def _is_idle(self, node: Node) -> bool:
        return node.lock_count == 0 and not node.children and node.num_pages > 0

    def _push_idle(self, node: Node) -> None:
        heapq.heappush(self._idle, (node.last_used, next(self._ticket), node))
        for heap in (self._idle, self._aside):
            if len(heap) > 64 and len(heap) > 4 * self.total_pages:
                heap[:] = [entry for entry in heap if self._is_current(entry)]
                heapq.heapify(heap)

    def _is_current(self, entry: _Entry) -> bool:
        return entry[2].last_used == entry[0] and self._is_idle(entry[2])

    def _first(self, heap: list[_Entry]) -> Node | None:
        """Drop stale entries. Return the node of the first other one, or None."""
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _drop_tail(self, node: Node, pages: int) -> None:
        """Free the last `pages` pages of an idle leaf. An empty leaf is removed from the tree,
        which may make its parent idle.
        """
        self.evictable_pages -= pages
        self.total_pages -= pages
        parent = node.parent
        assert parent is not None
        if self.events is not None:
            self.events.removed(node.hashes[-pages:])
            del node.hashes[-pages:]
        self.pins.shrink(node, pages)
        if self.below is not None:
            self.below.evicted(node.keys[-pages:], [column[-pages:] for column in node.columns])
        del node.keys[-pages:]
        for kind, column in zip(self._kinds, node.columns, strict=True):
            kind.forget(column[-pages:])
            del column[-pages:]
        node.num_pages -= pages
        node.tokens = node.tokens[: node.num_pages * self._page_size]
        if node.num_pages:
            self._push_idle(node)
            return
        self.pins.drop(node)
        del parent.children[node.key]
        if parent.parent is not None and self._is_idle(parent):
            self._push_idle(parent)
