"""What keeps blocks below the KV cache."""

from __future__ import annotations

from typing import Protocol

from ..cache.kv_events import KVEvents

KEY_BYTES = 20
Buffer = memoryview


class Store(Protocol):
    """Blocks by key, up to a number of bytes. Methods may be called from several threads."""

    on_disk: bool
    medium: str  # vLLM's word for it in KV events.
    events: KVEvents | None  # Hears of blocks that come and go.

    @property
    def num_bytes(self) -> int: ...

    def has(self, key: bytes) -> bool: ...

    def size_of(self, key: bytes) -> int:
        """Return the bytes of a block; 0 if it is missing."""

    def get(self, key: bytes, into: Buffer) -> bool:
        """Read a block into a buffer of its size. Return False if it is missing or damaged."""

    def put(self, key: bytes, payload: Buffer) -> bool:
        """Keep a block. Return False if it cannot be kept."""

    def block_keys(self) -> list[bytes]: ...

    def close(self) -> None: ...
