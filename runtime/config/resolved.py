"""The engine's settings with every number chosen (`resolve`)."""

from __future__ import annotations

from dataclasses import dataclass

from .engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The settings, with every number chosen."""

    page_size: int
    context_length: int
    chunked_prefill_size: int
    max_running_requests: int
    max_total_tokens: int
    piecewise_cuda_graph_max_tokens: int
    cuda_graph_max_bs: int
    disable_overlap_schedule: bool
    # Slots of recurrent states, with the reserved one. 0: the model has no recurrent states.
    state_slots: int = 0
    # Pages of sliding windows, with the reserved one. 0: windows have no pool of their own.
    window_pages: int = 0
    # Slabs of memory that window pages and full pages share, with the reserved one.
    kv_slabs: int = 0
