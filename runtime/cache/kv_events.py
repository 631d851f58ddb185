"""Events of the prefix tree, for routers that send requests where their prefix is cached.

They are vLLM's KV events (`--kv-events-config`).

Names, layout and defaults: vllm/config/kv_events.py and vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import ipaddress
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from ..core.generation import adapter_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FLAG = "--kv-events-config"
MEDIUM = "GPU"  # vLLM's word for the cache that attention reads, on CPUs too.
_MOST = 1_000_000
_LAST_PORT = 65535
_MOST_ID = 2**31 - 1
_SCHEMES = ("tcp://", "ipc://")
_KINDS = {"enable_kv_cache_events": bool, "buffer_steps": int, "hwm": int, "max_queue_size": int}
Event = dict[str, Any]  # The type, and the members in vLLM's order.


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where events go. Raises `ValueError` with a remedy.

    Attributes:
        endpoint: Address of a PUB socket.
        replay_endpoint: Address of a ROUTER socket, which sends the last `buffer_steps` batches.
        hwm: Batches that wait for a slow subscriber. Later ones are lost.
        max_queue_size: Batches that wait to be published.
        layout: "map", as vLLM, SGLang and their routers use it now, or "array", as in their first
            versions.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 10_000
    topic: str = ""
    layout: str = "map"

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """Read a JSON object with these members."""
        try:
            given = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{FLAG} is not JSON ({error}); give an object {_EXAMPLE}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{FLAG} is not a JSON object; give one like {_EXAMPLE}")
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{FLAG}: no member {name!r:.50}; there are {', '.join(known)}")
            kind = _KINDS.get(name, str)
            if type(value) is not kind and not (name == "replay_endpoint" and value is None):
                raise ValueError(f"{FLAG}: {name} must be of type {kind.__name__}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f"{FLAG}: publisher must be zmq or null, got {self.publisher!r:.50}")
        if self.layout not in ("map", "array"):
            raise ValueError(f"{FLAG}: layout must be map or array, got {self.layout!r:.50}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ValueError(
                    f"{FLAG}: {name} must lie between 1 and {_MOST}, got {getattr(self, name)}"
                )
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                _check_endpoint(name, value)

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def check_replicas(self, count: int) -> None:
        """Raise `ValueError` if two of `count` engines would bind the same address."""
        taken: set[str] = set()
        for endpoint in (each for number in range(count) for each in self.of_replica(number)):
            if not self.is_on or endpoint is None or not is_bound(endpoint):
                continue
            place = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint
            if place in taken or (place.isdigit() and int(place) > _LAST_PORT):
                raise ValueError(
                    f"{FLAG}: {count} engines cannot all bind, because {endpoint} is taken twice "
                    "or is not a port. Replica N binds the port N higher: keep endpoint and "
                    f"replay_endpoint at least {count} ports apart"
                )
            taken.add(place)

    def of_replica(self, number: int) -> tuple[str, str | None]:
        """Return the endpoints of replica `number`: the next port, or a file of its own."""
        return _offset(self.endpoint, number), self.replay_endpoint and _offset(
            self.replay_endpoint, number
        )

    def addresses(self, number: int) -> dict[str, str | None] | None:
        """Describe the endpoints of replica `number` for `/server_info`. None if events are off."""
        if not self.is_on:
            return None
        endpoint, replay = self.of_replica(number)
        return {"endpoint": endpoint, "replay_endpoint": replay, "topic": self.topic}


_EXAMPLE = """'{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}'"""


def _check_endpoint(name: str, value: str) -> None:
    if not value.startswith(_SCHEMES) or "\0" in value:
        raise ValueError(
            f"{FLAG}: {name} {value!r:.80} must be tcp://HOST:PORT, or ipc:// and a file"
        )
    if value.startswith("tcp://"):
        host, _, port = value.removeprefix("tcp://").rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
            raise ValueError(f"{FLAG}: {name} {value!r:.80} names no host and port")


def _offset(endpoint: str, number: int) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{number}" if number else endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + number}"


def is_bound(endpoint: str) -> bool:
    """Whether the publisher binds this endpoint: a file, all addresses, or the loopback address.

    Otherwise it connects to a listener there.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if endpoint.startswith("ipc://") or host in ("*", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


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
