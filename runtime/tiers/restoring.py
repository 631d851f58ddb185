"""Puts a prefix from lower tiers back into the KV cache."""

from __future__ import annotations

import torch

from ..cache.kv_cache import KVCache
from ..cache.radix import Node
from .block_copies import BlockCopies
from .tiers import Found, Piece


class Restoration:
    """One prefix, restored piece by piece while requests run.

    The restored pages are locked until `close`, so that no request evicts them before the request
    that waits for them finds them.
    """

    def __init__(self, cache: KVCache, copies: BlockCopies, found: Found) -> None:
        self._cache, self._copies, self._found = cache, copies, found
        self._locked = cache.tree.root

    def insert(self, piece: Piece, blocks: torch.Tensor) -> bool:
        """Write the blocks [n, bytes] of a piece into the cache.

        Return False if they do not fit, or if the pages before them are not in the cache.
        """
        if piece.kind == 0:
            return self._extend(piece.places, blocks)
        return self._fill(piece, blocks)

    def close(self) -> None:
        self._cache.tree.unlock(self._locked)
        self._locked = self._cache.tree.root

    def _extend(self, places: list[int], blocks: torch.Tensor) -> bool:
        """Add pages that follow the cached ones to the prefix tree."""
        tree, size, found = self._cache.tree, self._cache.page_size, self._found
        tokens = found.tokens[: (places[-1] + 1) * size]
        path, known = tree.match(tokens, found.namespace)
        if known < places[0]:
            return False
        self._lock(path[-1] if path else tree.root)
        # A request may have computed some of the pages meanwhile.
        missing = places[known - places[0] :]
        if not missing:
            return True
        numbers = self._cache.managers[0].allocate(len(missing))
        if numbers is None:
            return False
        node = tree.extend(tokens, found.namespace)[-1]
        node.columns[0][:] = numbers
        self._lock(node)
        self._copies.write(0, numbers, blocks[-len(missing) :])
        return True

    def _fill(self, piece: Piece, blocks: torch.Tensor) -> bool:
        """Fill holes of another kind of cache in pages that the tree has."""
        tree, found = self._cache.tree, self._found
        manager = self._cache.managers[piece.kind]
        path, known = tree.match(found.tokens, found.namespace)
        if known <= piece.places[-1]:
            return False
        self._lock(path[-1])
        numbers = manager.allocate(len(piece.places))
        if numbers is None:
            return False
        self._copies.write(piece.kind, [manager.number(each) for each in numbers], blocks)
        begin, rest = 0, list(zip(piece.places, numbers, strict=True))
        for node in path:
            column, keys = node.columns[piece.kind], node.keys
            while rest and rest[0][0] < begin + node.num_pages:
                place, block = rest.pop(0)
                if manager.number(column[place - begin]):
                    manager.forget([block])  # A request has computed it meanwhile.
                else:
                    column[place - begin] = block
                    manager.name(block, keys[place - begin])
            begin += node.num_pages
        return True

    def _lock(self, node: Node) -> None:
        self._cache.tree.lock(node)
        self._cache.tree.unlock(self._locked)
        self._locked = node
