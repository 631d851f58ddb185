"""Tiny diffusion pipelines for tests, and short ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.diffusion.clock import Clock
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.diffusion.model import DiffusionModel
from piecework.runtime.diffusion.state import State

Folder = Callable[[str], Path]
"""The folder of a family's tiny pipeline."""
FAMILIES = ["flux", "qwen-image", "wan"]


def load(path: Path, **settings: Any) -> DiffusionModel:
    return DiffusionModel(DiffusionConfig(model_path=str(path), num_threads=1, **settings))


def run(model: DiffusionModel, *params: DiffusionParams) -> list[State]:
    return model.generate(params, Clock(model.platform), lambda done, total: None)


def pixels(model: DiffusionModel, **params: Any) -> np.ndarray:
    (state,) = run(model, DiffusionParams(**params))
    assert state.pixels is not None
    return state.pixels


def reference(path: Path, seed: int, **arguments: Any) -> np.ndarray:
    """What diffusers' own call gives: [F, H, W, 3]."""
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(
        **arguments,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        return_dict=False,
    )[0]
    return np.asarray(output[0] if np.ndim(output) == 5 else output)
