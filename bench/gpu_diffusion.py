"""The GPU suite's diffusion part: FLUX.1's transformer at its real size with random weights, eager
and compiled by blocks.
"""

from __future__ import annotations

import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..compilation.regional import CompiledModels
from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_engines import LeftOut, Scale

_STEPS = 20
_WARM_UPS = 2
# The defaults of the class are FLUX.1-dev's shapes: 19 double and 38 single blocks of width 3,072.
_FLUX: dict[str, Any] = {"guidance_embeds": True}
_TINY: dict[str, Any] = _FLUX | {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def diffusion(compiled: bool, scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure twenty steps of the transformer on the latents of one image of 1024 x 1024 pixels.

    `first_ms` includes compilation. Raises `LeftOut` if diffusers is not installed.
    """
    if find_spec("diffusers") is None:
        raise LeftOut("diffusers is not installed")
    platform = detect(device)
    tiny = scale.dtype == "float32"
    model, inputs = _flux(
        platform, getattr(torch, scale.dtype), _TINY if tiny else _FLUX, side=4 if tiny else 64
    )
    report = CompiledModels({"transformer": model}, platform, regional=True) if compiled else None
    steps = []
    with torch.no_grad():
        for _ in range(_WARM_UPS + _STEPS):
            platform.synchronize()
            start = time.perf_counter()
            model(**inputs, return_dict=False)
            platform.synchronize()
            steps.append((time.perf_counter() - start) * 1000)
    return {
        "first_ms": steps[0],
        "step_ms": statistics.median(steps[_WARM_UPS:]),
        "total_ms": sum(steps[_WARM_UPS:]),
        "peak_bytes": platform.memory_use().peak_allocated,
        "compile": None if report is None else report.report(),
    }


def _flux(
    platform: Platform, dtype: torch.dtype, shapes: dict[str, Any], side: int
) -> tuple[Any, dict[str, Any]]:
    """Return the transformer and its inputs: an image of `side` x `side` packed latents and a
    prompt of 512 tokens.
    """
    from diffusers import FluxTransformer2DModel

    device, before = platform.device(), torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            model = FluxTransformer2DModel(**shapes).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.zeros(side, side, 3, device=device)
    ids[..., 1] += torch.arange(side, device=device)[:, None]
    ids[..., 2] += torch.arange(side, device=device)
    config = model.config
    drawn: dict[str, Any] = {"dtype": dtype, "device": device}
    return model, {
        "hidden_states": torch.randn(1, side * side, config.in_channels, **drawn),
        "encoder_hidden_states": torch.randn(1, 512, config.joint_attention_dim, **drawn),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **drawn),
        "timestep": torch.full((1,), 0.5, **drawn),
        "guidance": torch.full((1,), 3.5, device=device),
        "txt_ids": torch.zeros(512, 3, device=device),
        "img_ids": ids.view(-1, 3),
    }
