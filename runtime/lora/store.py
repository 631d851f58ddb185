"""All adapters of an engine: in files, in host memory, and in slots of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..core.adapter_info import AdapterInfo
from ..core.request import Request
from .adapter import NOT_FOUND, Adapter, AdapterFault
from .slots import AdapterSlots

CHANGED = "the files of the adapter have changed since it was loaded: load it again"


@dataclass(slots=True)
class _Entry:
    """A known adapter.

    Attributes:
        held: It in host memory, or None after it was evicted.
        users: Number of requests of it that have not ended.
        is_leaving: Whether it is dropped after its last request.
    """

    info: AdapterInfo
    held: Adapter | None
    users: int = 0
    slot: int | None = None
    is_leaving: bool = False
    last_used: int = 0


@dataclass(slots=True)
class _Slot:
    """A slot of the device. `running` is the number of running requests that use it."""

    identity: str | None = None
    running: int = 0
    last_used: int = 0


@dataclass(slots=True)
class AdapterStore:
    """The adapters of an engine, by identity.

    All ranks make the same calls in the same order, so they choose the same slots. If memory on the
    host is short, the least recently used adapters are dropped from it, and read again when a
    request needs them.

    Attributes:
        slots: Memory of the device.
        most_held: Number of adapters that are kept in host memory.
        read: Reads an adapter from a path. Raises `AdapterFault`.
    """

    slots: AdapterSlots
    most_held: int
    read: Callable[[str], Adapter]
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _clock: int = 0

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slots.count)]

    # The adapters

    def add(self, adapter: Adapter, name: str, path: str) -> AdapterInfo:
        """Make an adapter known, or known by another name, and keep it in host memory."""
        entry = self._entries.get(adapter.identity)
        info = AdapterInfo(
            identity=adapter.identity,
            name=name,
            path=path,
            rank=adapter.rank,
            num_layers=len(adapter.updates),
            num_bytes=adapter.num_bytes,
        )
        if entry is None:
            entry = self._entries[adapter.identity] = _Entry(info, adapter)
        else:
            entry.info, entry.held, entry.is_leaving = info, adapter, False
        entry.last_used = self._now()
        self._evict_held()
        return self.info(adapter.identity)

    def remove(self, identity: str) -> AdapterInfo:
        """Drop an adapter after its last request. Raise `AdapterFault` if it is not known."""
        info = self.info(identity)
        self._entries[identity].is_leaving = True
        self._drop_if_gone(identity)
        return info

    def info(self, identity: str) -> AdapterInfo:
        """Describe an adapter. Raise `AdapterFault` if it is not known."""
        if not self.is_known(identity):
            raise AdapterFault(
                "the request's adapter is not loaded (any more): load it again", NOT_FOUND
            )
        entry = self._entries[identity]
        return replace(entry.info, is_resident=entry.slot is not None)

    def infos(self) -> list[AdapterInfo]:
        """Describe all adapters, in the order in which they became known."""
        return [self.info(identity) for identity in self._entries if self.is_known(identity)]

    def is_known(self, identity: str) -> bool:
        """Whether new requests may use an adapter."""
        return identity in self._entries and not self._entries[identity].is_leaving

    def name_of(self, identity: str) -> str | None:
        """Return the last name of an adapter, or None after it was dropped."""
        entry = self._entries.get(identity)
        return None if entry is None else entry.info.name

    def must_be_read(self, identity: str) -> bool:
        """Whether a new request of a known adapter has to wait until it is read from its files."""
        entry = self._entries.get(identity)
        return entry is not None and entry.held is None and entry.slot is None

    @property
    def has_room(self) -> bool:
        """Whether one more adapter may be read into host memory."""
        held = [entry for entry in self._entries.values() if entry.held is not None]
        return len(held) < self.most_held or any(entry.users == 0 for entry in held)

    # Requests

    def begin(self, identity: str) -> None:
        """Count a new request.

        If the adapter is not in memory, it is read now. Raise `AdapterFault` if it is not known.
        """
        info = self.info(identity)
        if self.must_be_read(identity):
            adapter = self.read(info.path)
            if adapter.identity != identity:
                raise AdapterFault(CHANGED)
            self._entries[identity].held = adapter
        entry = self._entries[identity]
        entry.users += 1
        entry.last_used = self._now()

    def may_run(self, request: Request) -> bool:
        """Whether the request needs no adapter, or its adapter has a slot or can get one now."""
        if not request.adapter:
            return True
        return self._entries[request.adapter].slot is not None or self._free_slot() is not None

    def hold(self, request: Request) -> None:
        """Give the request's adapter a slot until `let_go`. `may_run` must be true."""
        if not request.adapter:
            return
        entry = self._entries[request.adapter]
        if entry.slot is None:
            number = self._free_slot()
            assert number is not None and entry.held is not None
            self._empty(number)
            self.slots.put(number, entry.held)
            self._slots[number].identity, entry.slot = request.adapter, number
        slot = self._slots[entry.slot]
        slot.running += 1
        slot.last_used = entry.last_used = self._now()
        request.adapter_slot = entry.slot

    def let_go(self, request: Request) -> None:
        """The request does not run any more. If it is finished, it does not come back."""
        if not request.adapter:
            return
        if request.adapter_slot >= 0:
            self._slots[request.adapter_slot].running -= 1
            request.adapter_slot = -1
        if request.finished:
            self._entries[request.adapter].users -= 1
            self._drop_if_gone(request.adapter)
            self._evict_held()

    def check(self, running: list[Request]) -> None:
        """Assert that slots and requests agree."""
        for number, slot in enumerate(self._slots):
            users = [request for request in running if request.adapter_slot == number]
            assert slot.running == len(users)
            assert all(request.adapter == slot.identity for request in users)
            assert slot.identity is None or self._entries[slot.identity].slot == number
        assert all(
            entry.users == 0 or entry.held is not None or entry.slot is not None
            for entry in self._entries.values()
        )

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _free_slot(self) -> int | None:
        """Return an empty slot, or the least recently used one that may be given away."""
        free = [number for number, slot in enumerate(self._slots) if self._may_empty(slot)]
        return min(free, key=lambda number: self._slots[number].last_used, default=None)

    def _may_empty(self, slot: _Slot) -> bool:
        if slot.identity is None or slot.running:
            return slot.identity is None
        entry = self._entries[slot.identity]
        # Requests that wait need it later.
        return entry.held is not None or entry.users == 0

    def _empty(self, number: int) -> None:
        slot = self._slots[number]
        if slot.identity is not None:
            self._entries[slot.identity].slot = None
            slot.identity, slot.last_used = None, 0

    def _drop_if_gone(self, identity: str) -> None:
        entry = self._entries[identity]
        if entry.is_leaving and entry.users == 0:
            if entry.slot is not None:
                self._empty(entry.slot)
            del self._entries[identity]

    def _evict_held(self) -> None:
        """Drop the least recently used adapters that no request needs from host memory."""
        held = [entry for entry in self._entries.values() if entry.held is not None]
        unused = sorted((each for each in held if not each.users), key=lambda each: each.last_used)
        for entry in unused[: max(0, len(held) - self.most_held)]:
            entry.held = None
