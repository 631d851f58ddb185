"""FLUX.1: CLIP and T5 prompts, a transformer distilled for guidance, latents packed two by two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.image_params import DiffusionParams
from .family import Family, stacked, truncation_warning
from .packed_latents import set_shifted_timesteps
from .state import State, Text

_T5_LENGTH = 512


class Flux(Family):
    """`FluxPipeline` of diffusers."""

    @classmethod
    def check_ranks(cls, folder: Path, ranks: int) -> None:
        super().check_ranks(folder, ranks)
        if _T5_LENGTH % ranks:
            raise ValueError(
                f"--ulysses-degree {ranks} does not divide the {_T5_LENGTH} tokens of a prompt; "
                "choose a power of two"
            )

    def encode_text(self, params: DiffusionParams) -> Text:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            params.prompt, device=self.device, max_sequence_length=_T5_LENGTH
        )
        warnings = truncation_warning(
            self.pipeline.tokenizer,
            params.prompt,
            self.pipeline.tokenizer_max_length,
            "text_encoder",
        ) + truncation_warning(
            self.pipeline.tokenizer_2, params.prompt, _T5_LENGTH, "text_encoder_2"
        )
        if params.negative_prompt:
            warnings += (
                "this pipeline was distilled for guidance without a negative prompt; "
                "negative_prompt was not used",
            )
        return Text(
            positive={"encoder_hidden_states": embeds, "pooled_projections": pooled},
            negative=None,
            warnings=warnings,
        )

    def draw_latents(self, params: DiffusionParams, generator: torch.Generator) -> torch.Tensor:
        channels = self.pipeline.transformer.config.in_channels // 4
        latents, _ = self.pipeline.prepare_latents(
            1,
            channels,
            params.height,
            params.width,
            self.pipeline.transformer.dtype,
            self.device,
            generator,
        )
        packed: torch.Tensor = latents
        return packed

    def set_timesteps(self, scheduler: Any, state: State) -> None:
        set_shifted_timesteps(scheduler, state, self.device)

    def predict(self, states: Sequence[State]) -> torch.Tensor:
        latents = torch.cat([state.latents for state in states if state.latents is not None])
        timestep = torch.stack([state.timestep for state in states]).to(latents.dtype) / 1000
        conditions = stacked([state.text.positive for state in states if state.text is not None])
        guidance = None
        if self.pipeline.transformer.config.guidance_embeds:
            scales = [float(state.params.guidance_scale or 0.0) for state in states]
            guidance = torch.tensor(scales, dtype=torch.float32, device=self.device)
        text_ids = torch.zeros(
            conditions["encoder_hidden_states"].shape[1], 3, device=self.device, dtype=latents.dtype
        )
        noise: torch.Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=timestep,
            guidance=guidance,
            txt_ids=text_ids,
            img_ids=self._image_ids(states[0].params, latents.dtype),
            return_dict=False,
            **conditions,
        )[0]
        return noise

    def decode(self, state: State) -> np.ndarray[Any, np.dtype[np.float32]]:
        pipeline, params = self.pipeline, state.params
        latents = pipeline._unpack_latents(
            state.latents, params.height, params.width, pipeline.vae_scale_factor
        )
        latents = latents / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        image = pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
        pixels: np.ndarray[Any, np.dtype[np.float32]] = pipeline.image_processor.postprocess(
            image, output_type="np"
        )
        return pixels

    def _image_ids(self, params: DiffusionParams, dtype: torch.dtype) -> torch.Tensor:
        """Return row and column of each packed latent: [rows * columns, 3]."""
        assert params.height is not None and params.width is not None
        rows, columns = params.height // self.size_multiple, params.width // self.size_multiple
        ids: torch.Tensor = self.pipeline._prepare_latent_image_ids(
            1, rows, columns, self.device, dtype
        )
        return ids
