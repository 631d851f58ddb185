"""The state that all stages work on: one image or video in the making.

C latent channels, F frames, H and W pixels, S denoising steps. A batch is a list of states of one
shape, so states may join and leave between any two steps, each at its own step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.image_params import DiffusionParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Encoded prompts, as keyword arguments of the transformer: each a tensor [1, ...] of one
    state.
    """

    positive: dict[str, torch.Tensor]
    negative: dict[str, torch.Tensor] | None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """What is known of one output so far.

    `latents`: [1, ...], packed as the transformer takes them. `timesteps`: [S]; `step`: how many of
    them are done. `pixels`: [F, H, W, 3] float32 between 0 and 1; an image has one frame.
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
        """States of one shape may be denoised side by side. Packed latents would not tell wide
        images from high ones.
        """
        return (self.params.width, self.params.height, self.params.num_frames)

    @property
    def timestep(self) -> torch.Tensor:
        """The noise level of the next step, a tensor without dimensions."""
        assert self.timesteps is not None, "timesteps are prepared first"
        return self.timesteps[self.step]
