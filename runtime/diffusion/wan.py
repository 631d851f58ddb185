"""Wan 2.x: videos, UMT5 prompts, and one transformer or two, of which the second computes the steps
with little noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..core.image_params import DiffusionParams, InvalidParams
from .family import Defaults, Family, call_defaults, stacked, truncation_warning
from .qwen_image import unscaled
from .state import State, Text

_LENGTH = 512


class Wan(Family):
    """`WanPipeline` of diffusers. If guidance is above 1, each step runs its transformer twice."""

    makes_video = True

    def validate(self, params: DiffusionParams) -> DiffusionParams:
        has_boundary = self.pipeline.config.boundary_ratio is not None
        second = params.guidance_scale_2
        if second is not None and not has_boundary:
            raise InvalidParams(
                "guidance_scale_2", "is for pipelines with two transformers (Wan 2.2); leave it out"
            )
        params = super().validate(replace(params, guidance_scale_2=None))
        frames, per_latent = params.num_frames, self.pipeline.vae_scale_factor_temporal
        assert frames is not None
        if frames % per_latent != 1:
            below = max(1, (frames - 1) // per_latent * per_latent + 1)
            raise InvalidParams(
                "num_frames",
                f"must be a multiple of {per_latent} plus 1, got {frames}; choose {below} or "
                f"{below + per_latent}",
            )
        if has_boundary:
            params = replace(
                params, guidance_scale_2=params.guidance_scale if second is None else second
            )
        return params

    def num_tokens(self, params: DiffusionParams) -> int:
        assert params.num_frames is not None
        per_latent = int(self.pipeline.vae_scale_factor_temporal)
        return ((params.num_frames - 1) // per_latent + 1) * super().num_tokens(params)

    def encode_text(self, params: DiffusionParams) -> Text:
        positive, negative = self.pipeline.encode_prompt(
            prompt=params.prompt,
            negative_prompt=params.negative_prompt,
            # The first scale decides for both transformers, as in the reference.
            do_classifier_free_guidance=(params.guidance_scale or 0.0) > 1,
            max_sequence_length=_LENGTH,
            device=self.device,
        )
        dtype = self._any_transformer.dtype
        tokenizer = self.pipeline.tokenizer
        warnings = truncation_warning(tokenizer, params.prompt, _LENGTH, "text_encoder")
        if negative is not None:
            warnings += truncation_warning(
                tokenizer, params.negative_prompt or "", _LENGTH, "text_encoder", "negative prompt"
            )
        return Text(
            positive={"encoder_hidden_states": positive.to(dtype)},
            negative=None if negative is None else {"encoder_hidden_states": negative.to(dtype)},
            warnings=warnings,
        )

    def draw_latents(self, params: DiffusionParams, generator: torch.Generator) -> torch.Tensor:
        channels = self._any_transformer.config.in_channels
        latents: torch.Tensor = self.pipeline.prepare_latents(
            1,
            channels,
            params.height,
            params.width,
            params.num_frames,
            torch.float32,
            self.device,
            generator,
        )
        return latents

    def set_timesteps(self, scheduler: Any, state: State) -> None:
        # On the host, because an NPU cannot convert the schedule's float64 to whole numbers.
        scheduler.set_timesteps(state.params.num_inference_steps, device="cpu")
        scheduler.timesteps = scheduler.timesteps.to(self.device)

    def predict(self, states: Sequence[State]) -> torch.Tensor:
        """Return the prediction. States on different sides of the boundary use different
        transformers.
        """
        first = [index for index, state in enumerate(states) if self._is_noisy(state)]
        second = [index for index in range(len(states)) if index not in first]
        noise: list[torch.Tensor | None] = [None] * len(states)
        for transformer, chosen, name in (
            (self.pipeline.transformer, first, "guidance_scale"),
            (self.pipeline.transformer_2, second, "guidance_scale_2"),
        ):
            if chosen:
                predicted = self._guided(transformer, [states[index] for index in chosen], name)
                for row, index in enumerate(chosen):
                    noise[index] = predicted[row : row + 1]
        return torch.cat([part for part in noise if part is not None])

    def _guided(self, transformer: Any, states: Sequence[State], scale_name: str) -> torch.Tensor:
        noise = self._run(
            transformer, states, [state.text.positive for state in states if state.text is not None]
        )
        guided = [
            index
            for index, state in enumerate(states)
            if state.text is not None and state.text.negative is not None
        ]
        if not guided:
            return noise
        chosen = [states[index] for index in guided]
        without = self._run(
            transformer,
            chosen,
            [state.text.negative or {} for state in chosen if state.text is not None],
        )
        scale = torch.tensor(
            [float(getattr(state.params, scale_name)) for state in chosen],
            dtype=noise.dtype,
            device=self.device,
        )
        combined = without + scale.view(-1, 1, 1, 1, 1) * (noise[guided] - without)
        return noise.index_copy(0, torch.tensor(guided, device=self.device), combined)

    def _run(
        self,
        transformer: Any,
        states: Sequence[State],
        conditions: Sequence[dict[str, torch.Tensor]],
    ) -> torch.Tensor:
        latents = torch.cat([state.latents for state in states if state.latents is not None])
        timestep = torch.stack([state.timestep for state in states])
        if self.pipeline.config.expand_timesteps:
            # Wan 2.2's 5B model needs a noise level for each patch.
            tokens = latents.shape[2] * -(-latents.shape[3] // 2) * -(-latents.shape[4] // 2)
            timestep = timestep.float()[:, None].expand(-1, tokens)
        noise: torch.Tensor = transformer(
            hidden_states=latents.to(transformer.dtype),
            timestep=timestep,
            return_dict=False,
            **stacked(conditions),
        )[0]
        return noise

    def decode(self, state: State) -> np.ndarray[Any, np.dtype[np.float32]]:
        vae = self.pipeline.vae
        assert state.latents is not None
        video = vae.decode(unscaled(state.latents.to(vae.dtype), vae), return_dict=False)[0]
        pixels: np.ndarray[Any, np.dtype[np.float32]] = (
            self.pipeline.video_processor.postprocess_video(video, output_type="np")[0]
        )
        return pixels

    @property
    def size_multiple(self) -> int:
        return int(
            self.pipeline.vae_scale_factor_spatial
            * max(self._any_transformer.config.patch_size[1:])
        )

    @property
    def _any_transformer(self) -> Any:
        return (
            self.pipeline.transformer
            if self.pipeline.transformer is not None
            else self.pipeline.transformer_2
        )

    def _is_noisy(self, state: State) -> bool:
        ratio = self.pipeline.config.boundary_ratio
        return ratio is None or bool(
            state.timestep >= ratio * self.pipeline.scheduler.config.num_train_timesteps
        )

    def _defaults(self) -> Defaults:
        call = call_defaults(self.pipeline)
        return Defaults(
            call["width"],
            call["height"],
            call["num_frames"],
            call["num_inference_steps"],
            call["guidance_scale"],
        )
