"""How much memory steps and their graphs take, tried out before the KV cache gets the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from ...compilation.capture import Graphs
from ...compilation.histogram import LengthHistogram
from ...compilation.whole import BreakableForward
from ...kernels.platform import Platform
from ..config.engine import Backend, ResolvedConfig
from ..core.forward_context import PagedAttention
from ..distributed.ranks import ALONE, Ranks
from ..graphs.graph_runner import GraphRunner
from ..models.causal_lm import CausalLM
from .warm_up import run_dummy_batch, sample

ComputeLogits = Callable[[torch.Tensor], torch.Tensor | None]
"""Hidden states [N, hidden] to logits [N, V] float32, None on all ranks but the first."""

logger = logging.getLogger(__name__)

_HEADROOM = 0.03
"""Share of the memory that stays free: what real steps take beyond dummy ones, and fragments
between allocations.
"""


def profile_memory(
    model: CausalLM,
    platform: Platform,
    config: ResolvedConfig,
    attention: PagedAttention,
    seen: LengthHistogram,
    ranks: Ranks = ALONE,
    compute_logits: ComputeLogits | None = None,
) -> int:
    """Bytes that are free while the device holds what the largest steps and all graphs take, less
    what is kept back.

    The largest steps run, eagerly, and the two largest sizes of each kind of graph are captured:
    the others share their memory, and each is taken to need beside it what the second needed.
    `attention` is over the smallest cache: all of it stores to the reserved page. Nothing of it
    stays. `compute_logits`: of all ranks, where the model's own are a part. Raises `ValueError`
    with a remedy where the largest steps do not fit.
    """
    was_frozen = gc.get_freeze_count() > 0
    try:
        logits = compute_logits or model.compute_logits
        return _profile(model, platform, config, attention, seen, ranks, logits)
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        raise ValueError(
            f"too little memory for steps of {config.chunked_prefill_size} tokens and "
            f"{config.max_running_requests} requests: "
            "lower --chunked-prefill-size or --max-running-requests, or choose a smaller model"
        ) from error
    finally:
        # The first capture has taken all that was alive out of the collector's sight, these graphs
        # among it.
        gc.unfreeze()
        gc.collect()
        if was_frozen:
            gc.freeze()
        platform.empty_cache()


def _profile(
    model: CausalLM,
    platform: Platform,
    config: ResolvedConfig,
    attention: PagedAttention,
    seen: LengthHistogram,
    ranks: Ranks,
    compute_logits: ComputeLogits,
) -> int:
    before = platform.memory().free
    _run_largest_steps(model, platform, config, attention, compute_logits)
    platform.end_trials()
    graphs = GraphRunner(model, platform, config, attention, seen, ranks)
    # Pieces take what the model takes that is recorded as it runs, which needs no compiler.
    graphs.use(BreakableForward(model) if graphs.prefill is not None else None)
    to_come = sum(_capture_two(phase, platform) for phase in graphs.phases())
    memory = platform.memory()
    compiler = platform.compiler_bytes if config.prefill_backend is Backend.PIECEWISE else 0
    kept = max(compiler, int(_HEADROOM * memory.total))
    taken = (before - memory.free + to_come) / 2**20
    logger.info(
        "steps and graphs take %.0f MiB, another %.0f MiB stay free; the KV cache may take what is "
        "left",
        taken,
        kept / 2**20,
    )
    return max(0, memory.free - to_come - kept)


@torch.inference_mode()
def _run_largest_steps(
    model: CausalLM,
    platform: Platform,
    config: ResolvedConfig,
    attention: PagedAttention,
    compute_logits: ComputeLogits,
) -> None:
    """The longest chunk of a prompt, and a token for as many requests as can run; the allocator
    keeps what they took.
    """
    length = min(config.chunked_prefill_size, config.context_length)
    run_dummy_batch(model, attention, platform, [length], [length])
    rows = config.max_running_requests
    logits = compute_logits(run_dummy_batch(model, attention, platform, [1] * rows, [1] * rows))
    if logits is not None:
        sample(logits)
    platform.synchronize()


def _capture_two(phase: Graphs, platform: Platform) -> int:
    """Captures the two largest sizes; how many bytes all others will take beside the memory that
    they share with these.
    """
    last = 0
    for size in phase.pending()[:2]:
        before = _own_bytes(platform)
        phase.capture(size)
        last = max(0, _own_bytes(platform) - before)
    return last * len(phase.pending())


def _own_bytes(platform: Platform) -> int:
    """What is taken for good: live tensors, and what lies outside the allocator, where the driver
    keeps graphs.
    """
    memory, use = platform.memory(), platform.memory_use()
    return memory.total - memory.free - use.reserved + use.allocated
