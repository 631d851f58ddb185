"""Tiny diffusion pipelines for tests, and short ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from piecework.runtime.diffusion.clock import Clock
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.diffusion.model import DiffusionModel
from piecework.runtime.diffusion.params import DiffusionParams
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
