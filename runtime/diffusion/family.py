"""Families of pipelines that are denoised step by step. A family is a class, and each stage is a
method.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.image_params import DiffusionParams, InvalidParams
from .state import State, Text
from .ulysses import check_heads, check_version

# Names of the folders of models that denoise.
_DENOISER = re.compile(r"^transformer|(^|_)dit(_|$)|(^|_)bridge$")


class Defaults(NamedTuple):
    """Values of parameters that a request does not set."""

    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float


class Family:
    """A loaded diffusers pipeline whose stages are run one by one.

    Schedulers have a state, so each image gets a copy.

    Attributes:
        pipeline: Supplies the parts and what is special about its text encoders and VAE.
        device: Where the pipeline runs. Its weights may be elsewhere.
        ranks: Number of ranks that share the tokens equally.
    """

    makes_video = False

    def __init__(self, pipeline: Any, device: torch.device, ranks: int = 1) -> None:
        self.pipeline, self.device, self.ranks = pipeline, device, ranks
        self.defaults = self._defaults()

    @classmethod
    def check_ranks(cls, folder: Path, ranks: int) -> None:
        """Raise `ValueError` if `ranks` ranks cannot share the work of the pipeline in `folder`.
        Nothing is loaded yet.
        """
        check_version()
        check_heads(folder, ranks)

    def transformers(self) -> dict[str, torch.nn.Module]:
        return transformers_of(self.pipeline)

    # Stages, in order

    def validate(self, params: DiffusionParams) -> DiffusionParams:
        """Return the parameters with defaults filled in. Raise `InvalidParams`."""
        chosen = {
            name: value
            for name, value in self.defaults._asdict().items()
            if getattr(params, name) is None
        }
        params = replace(params, **chosen)
        check_size(params, self.size_multiple)
        assert params.num_inference_steps is not None
        if params.num_inference_steps < self.min_steps:
            raise InvalidParams(
                "num_inference_steps",
                f"must be at least {self.min_steps} for this pipeline's scheduler",
            )
        if params.num_frames != 1 and not self.makes_video:
            raise InvalidParams(
                "num_frames", f"must be 1, got {params.num_frames}: this pipeline makes images"
            )
        if params.guidance_scale_2 is not None:
            raise InvalidParams(
                "guidance_scale_2", "is for pipelines with two transformers (Wan 2.2); leave it out"
            )
        if (tokens := self.num_tokens(params)) % self.ranks:
            raise InvalidParams(
                "width",
                f"or height must be a multiple of {self.size_multiple * self.ranks}: "
                f"{params.width} by {params.height} makes {tokens:,} tokens, which {self.ranks} "
                "ranks do not divide",
            )
        return params

    def encode_text(self, params: DiffusionParams) -> Text:
        raise NotImplementedError

    def draw_latents(self, params: DiffusionParams, generator: torch.Generator) -> torch.Tensor:
        """Return noise [1, ...] in the transformer's layout."""
        raise NotImplementedError

    def set_timesteps(self, scheduler: Any, state: State) -> None:
        raise NotImplementedError

    def predict(self, states: Sequence[State]) -> torch.Tensor:
        """Return the transformer's noise prediction for each state, with guidance applied:
        [len(states), ...].
        """
        raise NotImplementedError

    def decode(self, state: State) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return pixels [F, H, W, 3] between 0 and 1."""
        raise NotImplementedError

    # Shared by all families

    def num_tokens(self, params: DiffusionParams) -> int:
        """Return the number of tokens of the image or video."""
        assert params.height is not None and params.width is not None
        return (params.height // self.size_multiple) * (params.width // self.size_multiple)

    @property
    def size_multiple(self) -> int:
        """Width and height must be multiples of this: the VAE's factor times patches of
        two by two.
        """
        return int(self.pipeline.vae_scale_factor) * 2

    @property
    def default_area(self) -> int:
        """Pixels of an image of default size."""
        return self.defaults.width * self.defaults.height

    @property
    def min_steps(self) -> int:
        # A schedule of one step cannot end at a given noise level, because diffusers would divide 0
        # by 0.
        return 2 if self.pipeline.scheduler.config.get("shift_terminal") else 1

    def new_scheduler(self) -> Any:
        return copy.deepcopy(self.pipeline.scheduler)

    def _defaults(self) -> Defaults:
        call = call_defaults(self.pipeline)
        side = int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)
        return Defaults(side, side, 1, call["num_inference_steps"], call["guidance_scale"])


def transformers_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the models that denoise, by the names of their folders: transformers, towers such as
    `video_dit` and `audio_dit`, and the bridges between them.
    """
    parts = pipeline.components.items()
    return {
        name: part
        for name, part in parts
        if _DENOISER.search(name) and isinstance(part, torch.nn.Module)
    }


def call_defaults(pipeline: Any) -> dict[str, Any]:
    """Return the defaults of diffusers' pipeline call."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }


def truncation_warning(
    tokenizer: Any, text: str, limit: int, name: str, what: str = "prompt"
) -> tuple[str, ...]:
    """Return a warning if `tokenizer` gives more tokens of `text` than the encoder `name` reads.
    `what` names the text in the request.
    """
    length = len(tokenizer(text, truncation=False, verbose=False).input_ids)
    return (
        (f"{name} reads the first {limit} of the {what}'s {length} tokens; the rest was cut off",)
        if length > limit
        else ()
    )


def stacked(conditions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the conditions of several states."""
    return {
        name: torch.cat([condition[name] for condition in conditions]) for name in conditions[0]
    }


def check_size(params: DiffusionParams, multiple: int) -> None:
    """Raise `InvalidParams` if width or height is not a multiple of `multiple`."""
    for name in ("width", "height"):
        value = getattr(params, name) or 0
        below = value // multiple * multiple
        if value != below:
            nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise InvalidParams(
                name,
                f"must be a multiple of {multiple} for this pipeline's VAE, got {value}; choose "
                f"{nearest}",
            )
