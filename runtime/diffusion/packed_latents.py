"""Timesteps of families whose noise levels shift with the number of packed latents, such as FLUX.1
and Qwen-Image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .state import State


def set_shifted_timesteps(scheduler: Any, state: State, device: torch.device) -> None:
    """Set sigmas from 1 to 1/S, shifted by the image's length as in both families' reference
    pipelines.
    """
    steps = state.params.num_inference_steps
    assert steps is not None and state.latents is not None
    config = scheduler.config
    length, (base, most) = (
        state.latents.shape[1],
        (config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)),
    )
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (most - base)
    shift = config.get("base_shift", 0.5) + slope * (length - base)
    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
    levels = {"num_inference_steps": steps} if sigmas is None else {"sigmas": sigmas}
    scheduler.set_timesteps(device=device, mu=shift, **levels)
