"""Builds an engine in the calling process: a model runner, its KV cache and a core."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

from ..cache.kinds import make_cache
from ..cache.kv_events import KVEvents
from ..config.engine import EngineConfig
from ..distributed.ranks import ALONE, Ranks
from ..executor.model_runner import ModelRunner
from ..sampling.grammar_cache import Grammars
from ..sampling.plug_ins import Shape, load_plug_ins
from ..speculative.build import make_speculation
from ..tokenizer.tokenizer import load_tokenizer
from .core import EngineCore
from .graph_startup import GraphStartup
from .prompt_pace import PromptPace


class Engine(NamedTuple):
    """The parts of a language model's engine.

    The caller advances `startup` between batches until nothing is pending, and stops it at the end.
    """

    core: EngineCore
    runner: ModelRunner
    startup: GraphStartup


def build_engine(
    config: EngineConfig,
    *,
    progress: bool = True,
    ranks: Ranks = ALONE,
    kv_events: KVEvents | None = None,
) -> Engine:
    """Build an engine that is ready to serve.

    `kv_events` collects the changes of its prefix cache. Raise `ValueError` if it cannot start for
    a reason that the user can correct.
    """
    runner = ModelRunner(config, progress=progress, ranks=ranks)
    startup = GraphStartup(runner)
    if config.startup == "full" and ranks.rank == 0:
        startup.complete(progress=progress)
    resolved = runner.config
    seeds = random.Random(config.random_seed)
    cache = make_cache(
        runner.pool.num_pages,
        runner.pool.page_size,
        share_prefixes=not config.disable_radix_cache,
        state_slots=runner.states.num_slots if runner.states is not None else 0,
        window=runner.pool.window,
        window_pages=runner.pool.window_pages,
        shared=runner.pool.shared,
        num_slabs=runner.pool.num_slabs,
        events=kv_events,
    )
    core = EngineCore(
        runner,
        cache,
        token_budget=resolved.chunked_prefill_size,
        max_running_requests=resolved.max_running_requests,
        context_length=resolved.context_length,
        draw_seed=lambda: seeds.getrandbits(64),
        overlap=not resolved.disable_overlap_schedule,
        ranks=ranks,
        grammars=Grammars(
            partial(
                load_tokenizer,
                runner.model_path,
                config.tokenizer_path,
                gguf_pre_tokenizer=config.gguf_pre_tokenizer,
            ),
            runner.vocab_size,
            runner.eos_token_ids,
        ),
        plug_ins=load_plug_ins(
            config.plug_ins,
            Shape(
                runner.model_path,
                runner.vocab_size,
                resolved.context_length,
                resolved.max_running_requests,
            ),
            runner.device,
        ),
        speculation=make_speculation(config, runner, cache, progress=progress)
        if ranks.rank == 0
        else None,
        pace=PromptPace(config.mixed_step_seconds, lambda: runner.graphs.prefill_sizes)
        if ranks.rank == 0
        else None,
    )
    # The allocator still holds what the memory profile and the first steps have freed.
    runner.platform.give_back_memory()
    return Engine(core, runner, startup)
