"""Weights that wait in the CPU's memory: diffusers brings a block's to the device when it is run,
and takes them away behind it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.platform import Platform
from .config import DiffusionConfig

_KINDS = {
    "transformer": "dit_cpu_offload",
    "text_encoder": "text_encoder_cpu_offload",
    "vae": "vae_cpu_offload",
}
"""How the names of a pipeline's parts begin, and the setting that is for them."""


def is_offloaded(name: str, config: DiffusionConfig) -> bool:
    """Whether the pipeline's part of this name is to wait in the CPU's memory."""
    return any(
        name.startswith(kind) and getattr(config, setting) for kind, setting in _KINDS.items()
    )


def check_offload(config: DiffusionConfig, platform: Platform) -> None:
    """Raises `ValueError` where the weights have no other memory to go to."""
    for setting in _KINDS.values():
        if getattr(config, setting) and not platform.has_own_memory:
            raise ValueError(
                f"--{setting.replace('_', '-')}: a model that runs on {platform.device_type} has "
                "its weights in the CPU's memory already; leave it out"
            )


def offload(pipeline: Any, config: DiffusionConfig, platform: Platform) -> None:
    """From now on the parts that `config` names have their weights on the device only while they
    run: a transformer's block by block, others' layer by layer.

    Pinned memory is copied beside the work on what came before, on a stream of its own. Raises
    `ValueError` where the device cannot do that.
    """
    from diffusers.hooks import apply_group_offloading

    for name, part in pipeline.components.items():
        if not isinstance(part, torch.nn.Module) or not is_offloaded(name, config):
            continue
        blocks = name.startswith("transformer")
        try:
            apply_group_offloading(
                part,
                onload_device=platform.device(),
                offload_type="block_level" if blocks else "leaf_level",
                num_blocks_per_group=1 if blocks else None,
                use_stream=config.pin_cpu_memory,
                record_stream=config.pin_cpu_memory,
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the weights of {name} cannot be kept in the CPU's memory ({reason}); leave "
                "--pin-cpu-memory out, or offload less"
            ) from error
