"""Keeps blocks that leave the KV cache, and finds prefixes among them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..cache.block_pool import HOLE, Block
from ..cache.kv_cache import KVCache
from ..cache.kv_events import KVEvents
from .block_copies import BlockCopies
from .block_keys import BlockKeys, key_of_kind
from .saving_budget import SavingBudget
from .store import Store

logger = logging.getLogger(__name__)

_HERE = Block(1)  # Stands for a block that is in a lower tier.
_MOST_UNWRITTEN = 256 << 20  # Bytes of copied blocks that are not written yet. More are dropped.
_AT_ONCE = 32  # Pages whose keys are looked up, or whose blocks are copied, together.
_PIECE_BYTES = 4 << 20  # About what is copied into the cache between two steps.
_WRITING_SECONDS = 0.002  # How long copying pauses for the thread that writes.
_CLOSING_SECONDS = 10.0  # How long the end of the engine waits for the last blocks to be written.


class Piece(NamedTuple):
    """Blocks of one kind, which are loaded together: those of pages `places`."""

    kind: int
    places: list[int]
    keys: list[bytes]


class Found(NamedTuple):
    """A prefix that lower tiers can make longer.

    Attributes:
        tokens: The tokens of the whole prefix, [pages * page size] int64.
        gained: Number of its tokens that need not be computed then.
        sources: How many of these come from the host's memory and from disk.
        pieces: What must be loaded, in this order.
        num_bytes: Bytes of all blocks of the pieces.
    """

    tokens: npt.NDArray[np.int64]
    namespace: bytes
    gained: int
    sources: tuple[int, int]
    pieces: list[Piece]
    num_bytes: int


class Tiers:
    """The tiers below one KV cache, the fastest store first.

    The engine's thread copies blocks out of the cache; another thread writes them. A block that is
    already stored is not copied. If blocks leave the cache faster than they can be written, some
    are lost. While requests run, blocks are saved only within a budget of time.

    Attributes:
        budget: The time that saving may take while requests run.
        lost: Number of blocks that could not be written.
        dropped: Number of evicted blocks that were not saved because the budget was used up.
    """

    def __init__(
        self, cache: KVCache, copies: BlockCopies, keys: BlockKeys, stores: Sequence[Store]
    ) -> None:
        self.cache, self.copies, self._keys = cache, copies, keys
        self._stores = stores
        self.budget = SavingBudget()
        self.lost = self.dropped = 0
        self._unwritten: dict[bytes, npt.NDArray[np.uint8]] = {}
        self._unwritten_bytes = 0
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[bytes, SavingBudget | None] | None] = SimpleQueue()
        self._saving: Iterator[None] | None = None
        self._changes_saved = 0
        self._writer = Thread(target=self._write, name="kv-tiers", daemon=True)
        self._writer.start()
        cache.tree.below = self
        for kind, manager in enumerate(cache.managers):
            manager.save_by(partial(self._save_block, kind))

    # What the prefix tree calls

    def keys(
        self, parent: bytes | None, tokens: npt.NDArray[np.int64], namespace: bytes
    ) -> list[bytes]:
        return self._keys.of(parent, tokens, namespace)

    def evicted(self, keys: list[bytes], columns: list[list[Any]]) -> None:
        self._save_pages(keys, columns, self.budget)

    # Saving

    def _save_pages(
        self, keys: list[bytes], columns: list[list[Any]], budget: SavingBudget | None
    ) -> None:
        for kind, (manager, column) in enumerate(zip(self.cache.managers, columns, strict=True)):
            self._save(kind, [
                (key, number) for key, block in zip(keys, column, strict=True)
                if (number := manager.number(block))
            ], budget)  # fmt: skip

    @property
    def unsaved(self) -> bool:
        """Whether the cache may have pages that are not stored."""
        return self._saving is not None or self._changes_saved != self.cache.tree.changes

    def save_some(self) -> None:
        """Copy some of the cached pages that are not stored.

        Called while the engine is idle, so that prefixes survive its end. The budget does not
        limit it, because no request waits.
        """
        if self._saving is None:
            self._changes_saved = self.cache.tree.changes
            self._saving = self._save_all()
        if self._unwritten_bytes < _MOST_UNWRITTEN // 4 and next(self._saving, self) is self:
            self._saving = None

    def _save_all(self) -> Iterator[None]:
        for node in self.cache.tree.nodes():
            for begin in range(0, node.num_pages, _AT_ONCE):
                part = slice(begin, begin + _AT_ONCE)
                # Requests may have evicted the end of the node since the last part.
                columns = [column[part] for column in node.columns]
                self._save_pages(node.keys[part], columns, None)
                yield

    def _save_block(self, kind: int, key: bytes, number: int) -> None:
        self._save(kind, [(key, number)], self.budget)

    def _save(
        self, kind: int, blocks: Sequence[tuple[bytes, int]], budget: SavingBudget | None
    ) -> None:
        """Copy blocks that are not stored, and have them written, within the budget if given."""
        new = [
            (name, number) for key, number in blocks
            if not self._has(name := key_of_kind(key, kind))
        ]  # fmt: skip
        if not new:
            return
        for begin in range(0, len(new), _AT_ONCE):
            part = new[begin : begin + _AT_ONCE]
            if budget is not None and not budget.may_save:
                self.dropped += len(new) - begin
                return
            if budget is not None:
                self.copies.wait()
            began = time.monotonic()
            rows = self._copied(kind, [number for _, number in part])
            if rows is None:
                self.lost += len(part)
                continue
            if budget is not None:
                budget.spend(time.monotonic() - began)
            with self._lock:
                for (name, _), row in zip(part, rows, strict=True):
                    self._unwritten[name] = row
                    self._unwritten_bytes += row.nbytes
            for name, _ in part:
                self._queue.put((name, budget))

    def _copied(self, kind: int, numbers: list[int]) -> npt.NDArray[np.uint8] | None:
        """Return blocks [n, bytes], or None if memory is short."""
        if self._unwritten_bytes > _MOST_UNWRITTEN:
            return None
        try:
            return self.copies.read(kind, numbers).numpy()
        except (torch.OutOfMemoryError, MemoryError) as error:
            if not self.lost:
                logger.warning("KV cache tiers: blocks are lost, they cannot be copied: %s", error)
            return None

    def _has(self, name: bytes) -> bool:
        return name in self._unwritten or any(store.has(name) for store in self._stores)

    def _write(self) -> None:
        while (job := self._queue.get()) is not None:
            (name, budget), began = job, time.thread_time()
            row = self._unwritten[name]
            for store in self._stores:
                try:
                    self.lost += not store.put(name, row.data)
                except Exception:  # The thread must live on, or all later blocks are lost.
                    logger.exception("a block of the KV cache cannot be written")
                    self.lost += 1
            with self._lock:
                del self._unwritten[name]
                self._unwritten_bytes -= row.nbytes
            if budget is not None:
                budget.spend(time.thread_time() - began)  # Waiting for the disk takes no core.

    # Finding

    def find(self, tokens: npt.NDArray[np.int64], namespace: bytes) -> Found | None:
        """Return the longest prefix of `tokens` that lower tiers have, or None if the KV cache
        itself has one as long.

        The last token is left out, because it is always computed.
        """
        tree, size = self.cache.tree, self.cache.page_size
        whole = tokens[: (len(tokens) - 1) // size * size]
        path, known = tree.match(whole, namespace)
        keys = [key for node in path for key in node.keys]
        columns = [
            [block for node in path for block in node.columns[number]]
            for number in range(len(self.cache.managers))
        ]
        usable = self.cache.resumable(columns, known)
        keys += self._stored_after(keys[-1] if keys else None, whole[known * size :], namespace)
        missing = [list[int]() for _ in columns]
        for kind, (manager, column) in enumerate(zip(self.cache.managers, columns, strict=True)):
            column += [HOLE] * (len(keys) - len(column))
            for place, key in enumerate(keys):
                is_here = place < known and manager.number(column[place])
                # The first kind of all these pages was found before. Another answer now, after
                # another process has deleted a file, would leave a gap.
                if not is_here and (kind == 0 or self._has(key_of_kind(key, kind))):
                    column[place] = _HERE
                    missing[kind].append(place)
        end = self.cache.resumable(columns, len(keys))
        if end <= usable:
            return None
        pieces, num_bytes = list[Piece](), 0
        for kind, (manager, places) in enumerate(zip(self.cache.managers, missing, strict=True)):
            begin = manager.continues(end)
            wanted = [place for place in places if begin <= place < end]
            num_bytes += len(wanted) * self.copies.num_bytes[kind]
            most = min(_AT_ONCE, max(1, _PIECE_BYTES // max(1, self.copies.num_bytes[kind])))
            for first in range(0, len(wanted), most):
                part = wanted[first : first + most]
                pieces.append(Piece(kind, part, [key_of_kind(keys[each], kind) for each in part]))
        gained = (end - usable) * size
        memory = [store for store in self._stores if not store.on_disk]
        in_memory = size * sum(any(store.has(key) for store in memory) for key in keys[usable:end])
        sources = in_memory, gained - in_memory
        return Found(whole[: end * size], namespace, gained, sources, pieces, num_bytes)

    def _stored_after(
        self, parent: bytes | None, tokens: npt.NDArray[np.int64], namespace: bytes
    ) -> list[bytes]:
        """Return the keys of the pages after `parent` that lower tiers have, up to a gap."""
        found, step = list[bytes](), _AT_ONCE * self.cache.page_size
        for begin in range(0, len(tokens), step):
            last = found[-1] if found else parent
            keys = self._keys.of(last, tokens[begin : begin + step], namespace)
            stored = next((n for n, key in enumerate(keys) if not self._has(key)), len(keys))
            found += keys[:stored]
            if stored < _AT_ONCE:
                break
        return found

    # Loading

    def read(self, piece: Piece) -> torch.Tensor | None:
        """Return the blocks of a piece [n, bytes] uint8, or None if one is missing or damaged.

        May be called from another thread.
        """
        size = self.copies.num_bytes[piece.kind]
        blocks = np.empty((len(piece.keys), size), np.uint8)
        for row, key in zip(blocks, piece.keys, strict=True):
            with self._lock:
                unwritten = self._unwritten.get(key)
            if unwritten is not None:
                row[:] = unwritten
            elif not any(store.get(key, row.data) for store in self._stores):
                return None
        return torch.from_numpy(blocks)

    @property
    def num_bytes(self) -> list[int]:
        """Bytes in each store."""
        return [store.num_bytes for store in self._stores]

    def save_all(self) -> None:
        """Copy all cached pages that are not stored, as far as a few seconds allow."""
        until = time.monotonic() + _CLOSING_SECONDS
        while self.unsaved and time.monotonic() < until:
            self.save_some()
            if self._unwritten_bytes >= _MOST_UNWRITTEN // 4:
                time.sleep(_WRITING_SECONDS)

    def report_to(self, events: KVEvents) -> None:
        """Have events tell which blocks the stores have, get and lose."""
        events.watch(self._stores, self.cache.page_size)

    def rename(self, keys: BlockKeys) -> None:
        """Name blocks otherwise from now on, because the weights changed. The cache is empty."""
        self._keys = keys

    def close(self) -> None:
        """Write what is copied and as much of the rest of the cache as a few seconds allow."""
        until = time.monotonic() + _CLOSING_SECONDS
        self.save_all()
        self._queue.put(None)
        self._writer.join(max(0.0, until - time.monotonic()))
        if self._writer.is_alive():
            logger.warning("KV cache tiers: %d blocks were not written", len(self._unwritten))
            return
        for store in self._stores:
            store.close()
