"""Makes the adapters of an engine from its settings."""

from __future__ import annotations

from functools import partial

import torch

from ...kernels.platform.platform import Platform
from ..config.engine import EngineConfig
from ..models.causal_lm import CausalLM
from .adapter import AdapterFault
from .reading import read_adapter
from .slots import AdapterSlots
from .store import AdapterStore
from .targets import Targets

_MOST_RANK = 512
_LEAST_RANK = 16


def make_adapters(
    config: EngineConfig,
    model: CausalLM,
    platform: Platform,
    dtype: torch.dtype,
    most_tokens: int,
) -> AdapterStore | None:
    """Allocate the slots of a loaded model and read the adapters of --lora-modules.

    `most_tokens` is the size of the longest step. Return None if adapters are off. Raise
    `ValueError` that names the adapter.
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
    slots = make_slots(config, targets, platform, dtype, rank, most_tokens)
    read = partial(read_adapter, targets=targets, dtype=dtype, most_rank=rank)
    store = AdapterStore(slots, config.most_cpu_loras, read)
    for name, adapter in adapters.items():
        store.add(adapter, name, given[name])
    return store


def make_slots(
    config: EngineConfig,
    targets: Targets,
    platform: Platform,
    dtype: torch.dtype,
    rank: int,
    most_tokens: int,
    device: torch.device | None = None,
) -> AdapterSlots:
    """Give the layers of a model slots for adapters of up to `rank`.

    They are on `device`, or on the device of the platform.
    """
    return AdapterSlots(
        targets.layers,
        num_slots=config.max_loras,
        rank=rank,
        most_tokens=most_tokens,
        dtype=dtype,
        device=platform.device() if device is None else device,
        panel=platform.adapter_panel,
    )
