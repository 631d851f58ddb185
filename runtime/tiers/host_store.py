"""Blocks in the host's memory, for caches on a device."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from ..cache.kv_events import KVEvents
from .store import Buffer


class HostStore:
    """At most `max_bytes` of blocks. The least recently used ones are dropped first.

    All methods may be called from several threads.
    """

    on_disk, medium = False, "CPU"
    events: KVEvents | None = None

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def block_keys(self) -> list[bytes]:
        return list(self._blocks)

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def size_of(self, key: bytes) -> int:
        """Return the bytes of a block; 0 if it is missing."""
        return len(self._blocks.get(key, b""))

    def get(self, key: bytes, into: Buffer) -> bool:
        """Copy a block into a buffer of its size. Return False if it is missing."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None or len(block) != into.nbytes:
                return False
            self._blocks.move_to_end(key)
        into[:] = block
        return True

    def put(self, key: bytes, payload: Buffer) -> bool:
        """Keep a block. Return False if it is larger than the store."""
        block = bytes(payload)
        with self._lock:
            if len(block) > self.max_bytes:
                return False
            self.num_bytes += len(block) - len(self._blocks.pop(key, b""))
            self._blocks[key] = block
            dropped = list[bytes]()
            while self.num_bytes > self.max_bytes:
                oldest, old = self._blocks.popitem(last=False)
                self.num_bytes -= len(old)
                dropped.append(oldest)
            if self.events is not None:
                self.events.changed_below([key], self.medium, stored=True)
                self.events.changed_below(dropped, self.medium, stored=False)
        return True

    def close(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0
