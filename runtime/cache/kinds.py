"""The kinds of cache of a model."""

from __future__ import annotations

from itertools import count

from .block_pool import BlockPool
from .full_pages import FullPages
from .kv_cache import KVCache
from .kv_events import KVEvents
from .manager import CacheManager
from .pins import Clock, Pins
from .radix import Node, RadixCache
from .recurrent_states import RecurrentStates
from .room import Room
from .slabs import ALONE, SharedPages, Slabs
from .window_pages import WindowPages


def make_cache(
    num_pages: int,
    page_size: int,
    *,
    share_prefixes: bool,
    state_slots: int = 0,
    snapshot_tokens: int = 64,
    window: int | None = None,
    window_pages: int = 0,
    shared: SharedPages | None = None,
    num_slabs: int = 0,
    events: KVEvents | None = None,
) -> KVCache:
    """Make the caches of a model, with one manager per kind of layer that it has.

    Args:
        num_pages: Full pages, the reserved one included.
        state_slots: Slots of recurrent states, the reserved one included; 0 without such layers.
        snapshot_tokens: Least number of new tokens that are worth a snapshot of a state.
        window: The longest window of the windowed layers in tokens; None without such layers.
        window_pages: Window pages, the reserved one included, if they have memory of their own.
        shared, num_slabs: If set, full and window pages share `num_slabs` slabs. `num_pages` full
            pages of usual texts fit into them.
        events: Records the pages that enter and leave the prefix tree.
    """
    full, own = (ALONE, ALONE) if shared is None else (shared.full, shared.window)
    managers, clock, pins_clock = list[CacheManager](), count(1), Clock()
    # Pins take at most half of the memory, so that other prefixes are found, too.
    pins = Pins[Node](num_pages // 2, pins_clock)
    tree = RadixCache(page_size, managers, events=events, clock=clock, pins=pins)
    room = Room(Slabs(num_pages if shared is None else num_slabs))
    managers.append(FullPages(room, full, tree, page_size))
    if window is not None:
        own_room = room if shared is not None else Room(Slabs(window_pages))
        managers.append(WindowPages(BlockPool(own_room, own, clock, pins_clock), window, page_size))
    if state_slots:
        slots = BlockPool(Room(Slabs(state_slots)), pins_clock=pins_clock)
        managers.append(
            RecurrentStates(slots, snapshot_tokens if share_prefixes else None, page_size)
        )
    return KVCache(
        managers,
        tree,
        page_size=page_size,
        total_tokens=(num_pages - 1) * page_size,
        share_prefixes=share_prefixes,
        pins_clock=pins_clock,
    )
