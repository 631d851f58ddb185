"""The state that all stages work on: one image or video that is being made.

C latent channels, F frames, H and W pixels, S denoising steps. A batch is a list of states of one
shape. States may join and leave between two steps, and each has its own step number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.image_params import DiffusionParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Encoded prompts, as keyword arguments of the transformer. Each is a tensor [1, ...] of one
    state.
    """

    positive: dict[str, torch.Tensor]
    negative: dict[str, torch.Tensor] | None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """All that is computed of one output so far.

    Attributes:
        latents: [1, ...], packed for the transformer.
        timesteps: [S].
        step: The number of steps done.
        pixels: [F, H, W, 3] float32 between 0 and 1. An image has one frame.
    """

    params: DiffusionParams
    text: Text | None = None
    latents: torch.Tensor | None = None
    scheduler: Any = None
    timesteps: torch.Tensor | None = None
    step: int = 0
    pixels: np.ndarray[Any, np.dtype[np.float32]] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        assert self.timesteps is not None, "timesteps are prepared first"
        return len(self.timesteps)

    @property
    def denoised(self) -> bool:
        return self.step >= self.num_steps

    @property
    def shape(self) -> tuple[int | None, ...]:
        """States of one shape may be denoised together. The shape of packed latents is the same for
        wide and high images.
        """
        return (self.params.width, self.params.height, self.params.num_frames)

    @property
    def timestep(self) -> torch.Tensor:
        """The noise level of the next step, a tensor without dimensions."""
        assert self.timesteps is not None, "timesteps are prepared first"
        return self.timesteps[self.step]
