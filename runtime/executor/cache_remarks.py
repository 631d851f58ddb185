"""Lines of the start-up summary on caches of other shapes than one page table."""

from __future__ import annotations

from ..cache.pool import KVPool
from ..cache.states import StatePool
from ..config.resolve import WindowPages
from ..config.resolved import ResolvedConfig


def cache_remarks(
    windows: WindowPages | None, config: ResolvedConfig, pool: KVPool, states: StatePool | None
) -> dict[str, str]:
    """Return lines on windows and recurrent states."""
    remarks = {}
    if windows is not None and windows.shared is not None:
        remarks["windows"] = (
            f"layers that see {windows.window:,} tokens share the memory; texts longer than "
            f"{windows.typical(config):,} take less of it, shorter ones more"
        )
    elif pool.window is not None:
        tokens = (pool.window_pages - 1) * pool.page_size
        remarks["windows"] = (
            f"{tokens:,} tokens in the KV cache for layers that see {pool.window:,}"
        )
    if states is not None:
        remarks["states"] = (
            f"{states.num_slots - 1:,} of {states.slot_bytes / 2**20:.2f} MiB for requests that "
            "run and prefixes that are kept, in the memory of the KV cache; a request whose "
            "guessed tokens are verified needs two"
        )
    return remarks
