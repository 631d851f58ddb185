"""What an engine is told becomes settings in which every number is chosen: pure functions of the
model, the machine and its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, replace
from typing import NamedTuple

from ...kernels.platform import Platform
from ..cache.slabs import SharedPages
from .engine import EngineConfig, ResolvedConfig
from .model import ModelConfig
from .options import check_context_length


class WindowPages(NamedTuple):
    """Layers of a sliding window of `window` tokens, which have pages of their own."""

    window: int
    page_bytes: int
    """That one of those takes."""
    shared: SharedPages | None = None
    """How they share memory with pages of the other layers."""

    def beside(self, pages: int, steps: ResolvedConfig) -> int:
        """How many they have beside `pages` of the other layers.

        A request that is longer than its window needs those of its window. Memory is shared out
        for requests of `typical` length: shorter ones find fewer of these pages, longer ones fewer
        of the others, where each kind has memory of its own. More than one for each of the others,
        or more than twice what can run at once reads, is never of use. A step's new tokens come on
        top.
        """
        size = steps.page_size
        each = -(-(self.window - 1) // size) + 1
        chunk = -(-steps.chunked_prefill_size // size) + 1
        share = -(-pages * each * size // self.typical(steps))
        share = min(share, 2 * steps.max_running_requests * each)
        return min(pages, max(each, share) + chunk)

    def typical(self, steps: ResolvedConfig) -> int:
        """The length of texts that the size of the cache is told for: tokens."""
        return min(steps.context_length, max(4 * self.window, _TYPICAL_TOKENS))

    def slabs(self, pages: int, steps: ResolvedConfig) -> int:
        """How many hold both kinds, the reserved one among them; 0: they do not share memory."""
        shared = self.shared
        return 0 if shared is None else shared.slabs(pages, self.beside(pages, steps)) + 1

    @property
    def slab_bytes(self) -> int:
        """That one of those takes."""
        assert self.shared is not None
        return self.page_bytes // self.shared.window.tensors * self.shared.tensors


_TYPICAL_TOKENS = 2048
LEAST_PAGES, _MOST_PAGES = 2, 2**26
"""Of a KV cache; pages of models whose layers all have windows take no memory of their own."""
_MOST_TOKENS_OF_STATES = 2**22
"""Of a cache without pages, if the context is no longer: the prefix tree keeps their ids."""
_STATES_SHARE = 0.5
"""Most of the cache's memory that recurrent states may take, where there are pages beside them."""


def resolve_steps(config: EngineConfig, model: ModelConfig, platform: Platform) -> ResolvedConfig:
    """What steps depend on is chosen; the KV cache has the least of pages until `resolve_cache`.

    Raises `ValueError` for a context that the model does not have.
    """
    check_context_length(config.context_length, model.max_position_embeddings)
    context = config.context_length or model.max_position_embeddings
    page_size = config.page_size or platform.default_page_size
    chunk = config.chunked_prefill_size or min(platform.default_chunked_prefill_size, context)
    running = config.max_running_requests or platform.default_max_running_requests
    if (no_overlap := config.disable_overlap_schedule) is None:
        no_overlap = not platform.runs_beside_host
    chosen = {
        "page_size": page_size,
        "context_length": context,
        "chunked_prefill_size": chunk,
        "max_running_requests": running,
        "max_total_tokens": config.max_total_tokens or LEAST_PAGES * page_size,
        "mem_fraction_static": config.mem_fraction_static or platform.default_mem_fraction,
        "piecewise_cuda_graph_max_tokens": min(
            chunk, config.piecewise_cuda_graph_max_tokens or chunk
        ),
        "cuda_graph_max_bs": min(running, config.cuda_graph_max_bs or running),
        "disable_overlap_schedule": no_overlap,
        "disable_cuda_graph": config.disable_cuda_graph or platform.graph_obstacle() is not None,
    }
    return ResolvedConfig(**asdict(config) | chosen)


def resolve_cache(
    steps: ResolvedConfig,
    max_total_tokens: int | None,
    *,
    free_bytes: int,
    page_bytes: int,
    slot_bytes: int = 0,
    window: WindowPages | None = None,
) -> ResolvedConfig:
    """What `resolve_steps` gives, with the size of the KV cache chosen, and the context no longer
    than that.

    `max_total_tokens`: what was asked for; `free_bytes`: memory of which the cache gets its share,
    or all of it if no share is set; `page_bytes`: what a page of it takes; `slot_bytes`: what the
    recurrent states of a request take, by which fewer may run; `window`: of layers that have pages
    of their own beside those. Raises `ValueError` with a remedy where the memory does not suffice.
    """
    page_size, fraction = steps.page_size, steps.mem_fraction_static
    has_pages = page_bytes > 0 or window is not None
    if slot_bytes:
        steps = with_states(steps, free_bytes, slot_bytes, has_pages=has_pages)
    states = steps.state_slots * slot_bytes

    def bytes_of(pages: int) -> int:
        if window is None:
            return pages * page_bytes
        if window.shared is not None:
            return window.slabs(pages, steps) * window.slab_bytes
        return pages * page_bytes + window.beside(pages, steps) * window.page_bytes

    def most_pages(budget: int, limit: int) -> int:
        return bisect_right(range(limit + 1), budget, key=bytes_of) - 1

    if max_total_tokens is not None:
        pages = max_total_tokens // page_size
        if pages < LEAST_PAGES:
            raise ValueError(
                f"--max-total-tokens {max_total_tokens} is too few: the least is "
                f"{LEAST_PAGES * page_size}, two pages"
            )
        if bytes_of(pages) > free_bytes - states:
            raise ValueError(
                f"--max-total-tokens {max_total_tokens} takes {bytes_of(pages) / 2**20:.0f} "
                f"MiB, but {(free_bytes - states) / 2**20:.0f} MiB are free; at most "
                f"{max(0, most_pages(free_bytes - states, pages)) * page_size} tokens fit"
            )
    else:
        # More than every running request at full length would never be used.
        each = -(-steps.context_length // page_size)
        most = _MOST_PAGES if has_pages else max(each, _MOST_TOKENS_OF_STATES // page_size)
        pages = most_pages(
            int(free_bytes * (fraction or 1.0)) - states,
            min(most, steps.max_running_requests * each),
        )
        if pages < LEAST_PAGES:
            remedy = (
                f"raise --mem-fraction-static ({fraction})"
                if fraction is not None
                else f"lower --chunked-prefill-size ({steps.chunked_prefill_size}) or "
                f"--max-running-requests ({steps.max_running_requests})"
            )
            raise ValueError(
                f"too little memory for the KV cache: {free_bytes / 2**20:.0f} MiB are free, a "
                f"page of {page_size} tokens takes {bytes_of(1) / 2**20:.2f} MiB; {remedy}, or "
                "choose a smaller model"
            )
    size = pages * page_size
    return replace(
        steps,
        context_length=min(steps.context_length, size),
        max_total_tokens=size,
        window_pages=0
        if window is None or window.shared is not None
        else window.beside(pages, steps) + 1,
        kv_slabs=0 if window is None else window.slabs(pages, steps),
    )


def with_states(
    steps: ResolvedConfig, free_bytes: int, slot_bytes: int, *, has_pages: bool
) -> ResolvedConfig:
    """With as many running requests as there is memory for the states of, and up to as many slots
    more, in which prefixes keep snapshots. Raises `ValueError` where there is none for one.
    """
    fraction = steps.mem_fraction_static
    budget = int(free_bytes * (fraction or 1.0) * (_STATES_SHARE if has_pages else 1.0))
    slots = budget // slot_bytes - 1
    if slots < 1:
        remedy = "" if fraction is None else f"raise --mem-fraction-static ({fraction}), or "
        raise ValueError(
            f"too little memory for recurrent states: they may take {budget / 2**20:.0f} of "
            f"{free_bytes / 2**20:.0f} MiB that are free, two of {slot_bytes / 2**20:.2f} MiB are "
            f"the least; {remedy}choose a smaller model"
        )
    running = min(slots, steps.max_running_requests)
    return replace(
        steps,
        max_running_requests=running,
        cuda_graph_max_bs=min(running, steps.cuda_graph_max_bs),
        state_slots=(running if steps.disable_radix_cache else min(slots, 2 * running)) + 1,
    )
