"""Weights in the CPU's memory: diffusers copies a block's weights to the device when the block
runs, and drops them afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...kernels.platform.memory import Memory
from .config import DiffusionConfig

log = logging.getLogger(__name__)

# By the beginning of a part's name: the setting for the part.
_KINDS = {
    "transformer": "dit_cpu_offload",
    "text_encoder": "text_encoder_cpu_offload",
    "vae": "vae_cpu_offload",
}


def is_offloaded(name: str, config: DiffusionConfig) -> bool:
    """Return whether the pipeline's part `name` is offloaded to the CPU's memory."""
    return any(
        name.startswith(kind) and getattr(config, setting) for kind, setting in _KINDS.items()
    )


def check_offload(config: DiffusionConfig, platform: Memory) -> None:
    """Raise `ValueError` if the weights are in the CPU's memory anyway. Say so if
    `--pin-cpu-memory` has no effect.
    """
    if config.pin_cpu_memory and not any(getattr(config, setting) for setting in _KINDS.values()):
        log.info(
            "--pin-cpu-memory has no effect, because nothing is offloaded: add --dit-cpu-offload, "
            "--text-encoder-cpu-offload or --vae-cpu-offload to offload weights"
        )
    for setting in _KINDS.values():
        if getattr(config, setting) and not platform.has_own_memory:
            raise ValueError(
                f"--{setting.replace('_', '-')}: a model that runs on {platform.device_type} has "
                "its weights in the CPU's memory already; leave it out"
            )


def offload(pipeline: Any, config: DiffusionConfig, platform: Memory) -> None:
    """Keep the weights of the parts that `config` names on the device only while they run: a
    transformer's per block, others' per layer.

    Pinned memory is copied on a separate stream while the previous block runs. Raise `ValueError`
    if the device cannot do that.
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
