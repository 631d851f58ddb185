"""Traces and compiles a model's pieces into the cache, in a process that does not serve.

`python -m piecework.runtime.graphs.compile_pieces JOB` takes the JSON that `compile_process.start`
writes. The exit code is 0 if the cache holds all pieces that can be compiled. Otherwise it is 1,
and the standard output has the error as a line of JSON (`compile_process.Outcome`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compilation.capture import Reason
from ...compilation.core.errors import TraceError
from ...compilation.piece_maker import PieceMaker
from ...compilation.piece_store import PreparedForward
from ...compilation.torch_private import change_inductor
from ...kernels.linear import LinearKernels
from ...kernels.platform.detect import detect
from ..config.model import ModelConfig
from ..config.resolved import ResolvedConfig
from ..core.step_adapters import StepAdapters
from ..layers.images import register_ops
from ..loader.hollow import hollow_model
from ..loader.parallel import Shard
from ..lora.build import make_slots
from ..lora.targets import Targets
from ..models.causal_lm import CausalLM
from ..process.logs import set_up_logging
from ..process.progress import progress_bar
from ..quantization.methods import NOTHING_PACKED, Kinds
from .dummy_batch import dummy_adapters
from .pieces import TRACE_TOKENS, most_rows, piece_store, stored_key

_NICENESS = 10
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_BE_KILLED = "1000"


def make_pieces(
    maker: PieceMaker,
    model: nn.Module,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kinds: Kinds = NOTHING_PACKED,
    *,
    ranks: int = 1,
    ep_size: int = 1,
    adapters: StepAdapters | None = None,
) -> PreparedForward:
    """Load the model's forward in pieces from the cache, or trace and compile it into the cache.

    `kinds` are the linear layers whose weights are packed. The model is split over `ranks`, in
    `ep_size` groups of experts. With `adapters`, the forward adds their updates. Raise `TraceError`
    if the model cannot be traced.
    """
    device = maker.platform.device()
    example = [torch.arange(TRACE_TOKENS, device=device), torch.arange(TRACE_TOKENS, device=device)]
    split = {"ranks": ranks, "ep_size": ep_size}
    key = stored_key(model, model_config, dtype, kinds, **split, adapters=adapters is not None)
    with (
        torch.no_grad(),
        dummy_adapters(adapters, TRACE_TOKENS),
        progress_bar(desc="compiling pieces", unit=" pieces", leave=False) as bar,
    ):

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return replace(maker, progress=progress).make(model, example, model_key=key)


def make_all_pieces(
    maker: PieceMaker,
    config: ResolvedConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kernels: LinearKernels | None,
    kinds: Kinds,
    shard: Shard,
) -> None:
    """Fill the cache with the pieces of a model's steps.

    If `config.max_lora_rank` is set, also with those of steps with adapters. Raise as `make_pieces`
    does.
    """
    platform = detect(config.device)
    steps: list[StepAdapters | None] = [None]

    def add_slots(model: CausalLM) -> None:
        if config.max_lora_rank is not None:
            shape = config.max_lora_rank, most_rows(config)
            slots = make_slots(
                config, Targets(model), platform, dtype, *shape, torch.device("meta")
            )
            steps.append(slots.step)

    place = platform.device()
    model = hollow_model(model_config, dtype, place, kernels, kinds, shard, add_slots)
    split = {"ranks": config.tp_size, "ep_size": config.ep_size}
    for adapters in steps:
        make_pieces(maker, model, model_config, dtype, kinds, **split, adapters=adapters)


def main(argv: list[str]) -> int:
    set_up_logging("WARNING")
    job = json.loads(argv[0])
    # Give this process less processor time than the server, and let it be killed first if memory
    # runs out. The compiler's own processes inherit both.
    if hasattr(os, "nice"):
        os.nice(_NICENESS if job["niceness"] is None else job["niceness"])
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_FIRST_TO_BE_KILLED)
    try:
        _compile(job)
    except Exception as error:
        reason = Reason.TRACE_FAILED if isinstance(error, TraceError) else Reason.COMPILE_FAILED
        print(
            json.dumps([reason, " ".join(f"{error or type(error).__name__}".split())]), flush=True
        )
        return 1
    return 0


def _compile(job: dict[str, Any]) -> None:
    config, model_config, dtype = (
        ResolvedConfig(**job["config"]),
        ModelConfig.from_fields(job["model"]),
        getattr(torch, job["dtype"]),
    )
    platform = detect(config.device)
    platform.set_up(config.num_threads)
    change_inductor(job["inductor"])
    register_ops(platform.dispatch_key)
    maker = piece_store(PieceMaker, config, platform)
    maker.cache.check_writable()
    kernels = platform.linear_kernels(
        dtype, platform.attention_backend(config.attention_backend), config.cpu_activations
    )
    # The part of rank 0: all ranks have the same forward.
    shard = Shard(0, config.tp_size, platform.cuts_head_groups, config.ep_size)
    make_all_pieces(maker, config, model_config, dtype, kernels, job["kinds"], shard)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
