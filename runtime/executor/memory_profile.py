"""Measures the memory of steps and their graphs, before the KV cache gets the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from ...compilation.histogram import LengthHistogram
from ...compilation.whole import BreakableForward
from ...kernels.platform.device import Device
from ...kernels.platform.memory import Memory
from ...kernels.platform.platform import Platform
from ..config.engine import Backend
from ..config.resolved import ResolvedConfig
from ..core.forward_context import PagedAttention
from ..core.step_adapters import StepAdapters
from ..distributed.ranks import ALONE, Ranks
from ..graphs.graph_runner import GraphRunner
from ..models.causal_lm import CausalLM
from ..multimodal.encodings import Encodings
from .warm_up import run_dummy_batch, sample

# Maps hidden states [N, hidden] to logits [N, V] float32 on rank 0, to None on other ranks.
ComputeLogits = Callable[[torch.Tensor], torch.Tensor | None]

logger = logging.getLogger(__name__)

# Share of the memory that stays free: real steps may take more than dummy steps, and the allocator
# leaves fragments.
_HEADROOM = 0.03


def profile_memory(
    model: CausalLM,
    platform: Platform,
    config: ResolvedConfig,
    attention: PagedAttention,
    seen: LengthHistogram,
    ranks: Ranks = ALONE,
    compute_logits: ComputeLogits | None = None,
    adapters: StepAdapters | None = None,
    images: Encodings | None = None,
) -> int:
    """Return the bytes that are free beside the largest steps, all graphs, the encoder of images
    and a reserve.

    The largest steps run eagerly. Then the two largest sizes of each kind of graph are captured.
    Smaller graphs share their memory, and each is assumed to need as much beside it as the second
    size did. `attention` has the smallest cache, because dummy steps store to the reserved page
    only. `compute_logits` gives the logits of all ranks if the model's own are only a part.
    `adapters` is that of `GraphRunner`. An image may be half encoded while steps run, so the
    encoder's memory is added to that of steps.
    All memory of the profile is freed. Raise `ValueError` with a remedy if the largest steps do not
    fit.
    """
    was_frozen = gc.get_freeze_count() > 0
    try:
        logits = compute_logits or model.compute_logits
        of_images = 0 if images is None else _bytes_of_images(images, platform)
        free = _profile(model, platform, config, attention, seen, ranks, logits, adapters)
        return max(0, free - of_images)
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        raise ValueError(
            f"too little memory for steps of {config.chunked_prefill_size} tokens and "
            f"{config.max_running_requests} requests: "
            "lower --chunked-prefill-size or --max-running-requests, or choose a smaller model"
            + ("" if images is None else "; --disable-vision serves the text alone")
        ) from error
    finally:
        # The first capture has frozen all objects that were alive, these graphs included. Frozen
        # objects are not collected.
        gc.unfreeze()
        gc.collect()
        if was_frozen:
            gc.freeze()
        platform.empty_cache()


def _bytes_of_images(images: Encodings, platform: Memory) -> int:
    """Return the bytes that encoding takes, and the results that are kept."""
    before = platform.memory().free
    images.encode_largest()
    taken = max(0, before - platform.memory().free)
    platform.empty_cache()
    logger.info("encoding images takes %.0f MiB beside their results", taken / 2**20)
    return taken + images.most_bytes


def _profile(
    model: CausalLM,
    platform: Platform,
    config: ResolvedConfig,
    attention: PagedAttention,
    seen: LengthHistogram,
    ranks: Ranks,
    compute_logits: ComputeLogits,
    adapters: StepAdapters | None,
) -> int:
    """Run the steps and captures of `profile_memory`.

    Its variables hold the graphs, so that the graphs are gone when `profile_memory` frees their
    memory.
    """
    before = platform.memory().free
    _run_largest_steps(model, platform, config, attention, compute_logits)
    platform.end_trials()
    graphs = GraphRunner(model, platform, config, attention, seen, ranks, adapters)
    # Pieces take as much memory as the model recorded without them, which needs no compiler.
    has_prefills = graphs.base.prefill is not None
    graphs.use(*(BreakableForward(model) if has_prefills else None for _ in graphs.kinds))
    to_come = 0
    for phase in graphs.phases():
        beside = 0
        for size in phase.pending()[:2]:
            own = _own_bytes(platform)
            phase.capture(size)
            beside = max(0, _own_bytes(platform) - own)
        to_come += beside * len(phase.pending())
    memory = platform.memory()
    compiler = platform.compiler_bytes if config.prefill_backend is Backend.PIECEWISE else 0
    kept = max(compiler, int(_HEADROOM * memory.total))
    taken = (before - memory.free + to_come) / 2**20
    logger.info(
        "steps and graphs take %.0f MiB, another %.0f MiB stay free; the rest is for the KV cache",
        taken,
        kept / 2**20,
    )
    return max(0, memory.free - to_come - kept)


@torch.inference_mode()
def _run_largest_steps(
    model: CausalLM,
    platform: Device,
    config: ResolvedConfig,
    attention: PagedAttention,
    compute_logits: ComputeLogits,
) -> None:
    """Run the longest chunk of a prompt, and a decode of as many requests as can run. The allocator
    keeps their memory.
    """
    length = min(config.chunked_prefill_size, config.context_length)
    run_dummy_batch(model, attention, platform, [length], [length])
    rows = config.max_running_requests
    logits = compute_logits(run_dummy_batch(model, attention, platform, [1] * rows, [1] * rows))
    if logits is not None:
        sample(logits)
    platform.synchronize()


def _own_bytes(platform: Memory) -> int:
    """Return the bytes of live tensors and of all memory outside the allocator, where the driver
    keeps graphs.
    """
    memory, use = platform.memory(), platform.memory_use()
    return memory.total - memory.free - use.reserved + use.allocated
