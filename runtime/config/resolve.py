"""Chooses every number of the settings, by pure functions of the model, the machine and its
memory.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, replace
from typing import NamedTuple

from ...kernels.platform.step_defaults import StepDefaults
from ..cache.slabs import SharedPages
from .engine import Backend, EngineConfig
from .model import ModelConfig
from .options import check_context_length
from .resolved import ResolvedConfig


class WindowPages(NamedTuple):
    """Layers with a sliding window of `window` tokens and their own pages."""

    window: int
    page_bytes: int  # Bytes of one of these pages.
    shared: SharedPages | None = None  # How the pages share memory with pages of other layers.

    def beside(self, pages: int, steps: ResolvedConfig) -> int:
        """Return the number of window pages for `pages` pages of other layers.

        A request that is longer than its window needs the pages of its window. If each kind has its
        own memory, it is divided for requests of `typical` length. More window pages than other
        pages, or than twice what the running requests read at once, are never useful. The new
        tokens of a step are added.
        """
        size = steps.page_size
        each = -(-(self.window - 1) // size) + 1
        chunk = -(-steps.chunked_prefill_size // size) + 1
        share = -(-pages * each * size // self.typical(steps))
        share = min(share, 2 * steps.max_running_requests * each)
        return min(pages, max(each, share) + chunk)

    def typical(self, steps: ResolvedConfig) -> int:
        """Length of texts, in tokens, for which the size of the cache is computed."""
        return min(steps.context_length, max(4 * self.window, _TYPICAL_TOKENS))

    def slabs(self, pages: int, steps: ResolvedConfig) -> int:
        """Return the number of slabs for both kinds, with the reserved one. 0: memory is not
        shared.
        """
        shared = self.shared
        return 0 if shared is None else shared.slabs(pages, self.beside(pages, steps)) + 1

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab."""
        assert self.shared is not None
        return self.page_bytes // self.shared.window.tensors * self.shared.tensors


_TYPICAL_TOKENS = 2048
# Tokens of the largest full graph of prefills, whose attention reads keys and values per token.
_MOST_FULL_TOKENS = 256
# Limits of a KV cache. Pages take no memory if all layers have windows.
LEAST_PAGES, _MOST_PAGES = 2, 2**26
# Most tokens of a cache without pages, unless the context is longer. The prefix tree keeps their
# ids.
_MOST_TOKENS_OF_STATES = 2**22
# Largest share of recurrent states in the memory of the cache, if there are pages too.
_STATES_SHARE = 0.5


def resolve_steps(
    config: EngineConfig, model: ModelConfig, platform: StepDefaults
) -> ResolvedConfig:
    """Choose what steps depend on. The KV cache has the least pages until `resolve_cache`.

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
            chunk,
            config.piecewise_cuda_graph_max_tokens
            or (_MOST_FULL_TOKENS if config.prefill_backend is Backend.FULL else chunk),
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
    """Return the settings with the size of the KV cache, and a context that is not longer than it.

    Raises `ValueError` with a remedy if there is too little memory.

    Args:
        max_total_tokens: The requested size.
        free_bytes: Free memory. The cache gets its share of it, or all if no share is set.
        page_bytes: Bytes of a page.
        slot_bytes: Bytes of the recurrent states of a request. They may reduce the running
            requests.
        window: Layers with their own pages.
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
        # Running requests at full length never use more.
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
    """Return the settings with as many running requests as there is memory for states.

    Up to as many further slots keep snapshots of prefixes, and states before guessed tokens. Raises
    `ValueError` if there is no memory for one.
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
    needs_one = steps.disable_radix_cache and steps.speculative_algorithm == "none"
    return replace(
        steps,
        max_running_requests=running,
        cuda_graph_max_bs=min(running, steps.cuda_graph_max_bs),
        state_slots=(running if needs_one else min(slots, 2 * running)) + 1,
    )
