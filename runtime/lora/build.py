"""Makes the adapters of an engine from its settings."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from ..config.resolve import resolve_steps
from ..graphs.pieces import most_tokens
from ..models.causal_lm import CausalLM
from .adapter import AdapterFault
from .reading import read_adapter
from .slots import AdapterSlots
from .store import AdapterStore
from .targets import Targets

_MOST_RANK = 512
_LEAST_RANK = 16


def make_adapters(
    config: EngineConfig, model: CausalLM, platform: Platform, dtype: torch.dtype
) -> AdapterStore | None:
    """Allocate the slots of a loaded model and read the adapters of --lora-modules.

    Return None if adapters are off. Raise `ValueError` that names the adapter.
    """
    if not config.uses_lora:
        return None
    targets, limit = Targets(model), config.max_lora_rank or _MOST_RANK
    if not targets.layers:
        raise ValueError(
            "--enable-lora: this model has no linear layers that adapters could "
            "change; leave it and --lora-modules out"
        )
    given = config.lora_modules_by_name()
    adapters = {}
    for name, path in given.items():
        try:
            adapters[name] = read_adapter(path, targets, dtype, limit)
        except AdapterFault as error:
            raise ValueError(f"--lora-modules {name}={path}: {error}") from None
    rank = config.max_lora_rank or max(
        [_LEAST_RANK, *(adapter.rank for adapter in adapters.values())]
    )
    slots = AdapterSlots(
        targets.layers,
        num_slots=config.max_loras,
        rank=rank,
        most_tokens=most_tokens(resolve_steps(config, model.config, platform)),
        dtype=dtype,
        device=platform.device(),
        panel=platform.adapter_panel,
    )
    read = partial(read_adapter, targets=targets, dtype=dtype, most_rank=rank)
    store = AdapterStore(slots, config.most_cpu_loras, read)
    for name, adapter in adapters.items():
        store.add(adapter, name, given[name])
    return store
