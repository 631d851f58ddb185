"""Events of the prefix tree, for routers that send requests where their prefix is cached.

They are vLLM's KV events. Layout: vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from ..core.generation import adapter_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MEDIUM = "GPU"  # vLLM's word for the cache that attention reads, on CPUs too.
_MOST_ID = 2**31 - 1
Event = dict[str, Any]  # The type, and the members in vLLM's order.

# Bits of a key's first byte that number the kind of cache of a block (`tiers.block_keys`).
_KIND = 15


def block_hash(parent: int | None, tokens: npt.NDArray[np.int64]) -> int:
    """Return a 64-bit hash of a page of tokens and of its parent, the same in every process."""
    before = b"" if parent is None else parent.to_bytes(8, "little")
    digest = blake2b(before + tokens.astype("<i8").tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def hash_of_key(key: bytes) -> int:
    """Return the hash by which events name the block of a key in a lower tier.

    The first byte is left out, because it also numbers the kind of cache.
    """
    return int.from_bytes(key[1:9], "little")


def _number_of(adapter: str) -> int:
    """Return the positive number of an adapter, which is the same in every replica."""
    digest = blake2b(adapter.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % _MOST_ID + 1


class WatchedStore(Protocol):
    """A lower tier that reports its blocks by `KVEvents.changed_below`."""

    medium: str
    events: KVEvents | None

    def block_keys(self) -> list[bytes]: ...


class KVEvents:
    """Collects events until they are taken.

    >>> cache = RadixCache(free, page_size, events=(events := KVEvents()))
    >>> events.take()  # After each step.
    """

    def __init__(self) -> None:
        # After a restart, nothing is left of the previous engine's cache.
        self._events: list[Event] = [{"type": "AllBlocksCleared"}]
        self._below: deque[Event] = deque()  # From other threads, too.
        self._stores: Sequence[WatchedStore] = ()
        self._page_size = 0
        # Returns the name of an adapter (LoRA) by its identity.
        self.name_of_adapter: Callable[[str], str | None] = lambda identity: None

    def stored(
        self,
        parent: int | None,
        tokens: npt.NDArray[np.int64],
        page_size: int,
        namespace: bytes = b"",
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Record whole pages that entered the tree. Return their hashes.

        `tokens` are [pages * page_size] int64. The namespace tells the adapter, and hashes of pages
        without a parent depend on it. If there are lower tiers, `keys` name the pages there, and
        the hashes are theirs.
        """
        hashes, last = [hash_of_key(key) for key in keys], parent
        if parent is None and namespace:
            last = int.from_bytes(blake2b(namespace, digest_size=8).digest(), "little")
        for begin in range(0, 0 if keys else len(tokens), page_size):
            last = block_hash(last, tokens[begin : begin + page_size])
            hashes.append(last)
        adapter = adapter_of(namespace)
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": list(hashes),
                "parent_block_hash": parent,
                # Negative names of image positions become ids that routers can hold, too.
                "token_ids": (tokens & _MOST_ID).tolist(),
                "block_size": page_size,
                "lora_id": _number_of(adapter) if adapter else None,
                "medium": MEDIUM,
                "lora_name": self.name_of_adapter(adapter) if adapter else None,
            }
        )
        return hashes

    def removed(self, hashes: list[int]) -> None:
        self._events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM})

    def cleared(self) -> None:
        """Record that the tree is empty. Earlier events are dropped."""
        self._events = [{"type": "AllBlocksCleared"}]
        self._below.clear()
        self._announce()

    def watch(self, stores: Sequence[WatchedStore], page_size: int) -> None:
        """Record what lower tiers have, and from now on what they get and lose."""
        self._stores, self._page_size = stores, page_size
        for store in stores:
            store.events = self
        self._announce()

    def changed_below(self, keys: Iterable[bytes], medium: str, *, stored: bool) -> None:
        """Record blocks that a lower tier has got or lost. Any thread may call this.

        A page is announced once: by the block of the first kind of cache, which has all pages.
        """
        hashes = [hash_of_key(key) for key in keys if not key[0] & _KIND]
        if not hashes:
            return
        if not stored:
            self._below.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})
            return
        # vLLM's offloading names neither parents nor tokens: those were told with medium GPU.
        self._below.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": self._page_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
            }
        )

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        while self._below:
            events.append(self._below.popleft())
        return events

    def _announce(self) -> None:
        for store in self._stores:
            self.changed_below(store.block_keys(), store.medium, stored=True)
