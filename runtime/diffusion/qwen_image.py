"""Qwen-Image: prompts through Qwen2.5-VL, classifier-free guidance that keeps the length of the
prediction, latents packed two by two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.image_params import DiffusionParams
from .family import Defaults, Family, call_defaults, truncation_warning
from .packed_latents import set_shifted_timesteps
from .state import State, Text

_LENGTH = 512
_NO_NEGATIVE = " "  # The default negative prompt, as the model's authors recommend.


class QwenImage(Family):
    """`QwenImagePipeline` of diffusers. `guidance_scale` is its `true_cfg_scale`. If it is above 1,
    each step runs the transformer twice.
    """

    def encode_text(self, params: DiffusionParams) -> Text:
        negative = (
            self._encode(params.negative_prompt or _NO_NEGATIVE)
            if (params.guidance_scale or 0.0) > 1
            else None
        )
        template = self.pipeline.prompt_template_encode
        # The template's beginning is encoded, and its embeddings are dropped.
        limit = _LENGTH + self.pipeline.prompt_template_encode_start_idx
        warnings: tuple[str, ...] = ()
        for text, what in (
            (params.prompt, "prompt"),
            (params.negative_prompt if negative else None, "negative prompt"),
        ):
            warnings += truncation_warning(
                self.pipeline.tokenizer, template.format(text or ""), limit, "text_encoder", what
            )
        return Text(positive=self._encode(params.prompt), negative=negative, warnings=warnings)

    def _encode(self, prompt: str) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=_LENGTH
        )
        return {"encoder_hidden_states": embeds}

    def draw_latents(self, params: DiffusionParams, generator: torch.Generator) -> torch.Tensor:
        channels = self.pipeline.transformer.config.in_channels // 4
        latents: torch.Tensor = self.pipeline.prepare_latents(
            1,
            channels,
            params.height,
            params.width,
            self.pipeline.transformer.dtype,
            self.device,
            generator,
        )
        return latents

    def set_timesteps(self, scheduler: Any, state: State) -> None:
        set_shifted_timesteps(scheduler, state, self.device)

    def predict(self, states: Sequence[State]) -> torch.Tensor:
        noise = self._run(
            states, [state.text.positive for state in states if state.text is not None]
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
            chosen, [state.text.negative or {} for state in chosen if state.text is not None]
        )
        scale = torch.tensor(
            [float(state.params.guidance_scale or 0.0) for state in chosen],
            dtype=noise.dtype,
            device=self.device,
        )
        with_prompt = noise[guided]
        combined = without + scale.view(-1, 1, 1) * (with_prompt - without)
        rescaled = combined * (
            torch.norm(with_prompt, dim=-1, keepdim=True)
            / torch.norm(combined, dim=-1, keepdim=True)
        )
        return noise.index_copy(0, torch.tensor(guided, device=self.device), rescaled)

    def _run(
        self, states: Sequence[State], conditions: Sequence[dict[str, torch.Tensor]]
    ) -> torch.Tensor:
        latents = torch.cat([state.latents for state in states if state.latents is not None])
        timestep = torch.stack([state.timestep for state in states]).to(latents.dtype) / 1000
        embeds, mask = _padded(
            [condition["encoder_hidden_states"] for condition in conditions], self.ranks
        )
        params = states[0].params
        assert params.height is not None and params.width is not None
        shape = (1, params.height // self.size_multiple, params.width // self.size_multiple)
        noise: torch.Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=timestep,
            guidance=None,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[shape]] * len(states),
            attention_kwargs={},
            return_dict=False,
        )[0]
        return noise

    def decode(self, state: State) -> np.ndarray[Any, np.dtype[np.float32]]:
        pipeline, params, vae = self.pipeline, state.params, self.pipeline.vae
        latents = pipeline._unpack_latents(
            state.latents, params.height, params.width, pipeline.vae_scale_factor
        )
        image = vae.decode(unscaled(latents.to(vae.dtype), vae), return_dict=False)[0][:, :, 0]
        pixels: np.ndarray[Any, np.dtype[np.float32]] = pipeline.image_processor.postprocess(
            image, output_type="np"
        )
        return pixels

    def _defaults(self) -> Defaults:
        return (
            super()
            ._defaults()
            ._replace(guidance_scale=call_defaults(self.pipeline)["true_cfg_scale"])
        )


def _padded(
    embeds: Sequence[torch.Tensor], multiple: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pad prompts [1, length, width] to the longest, rounded up to `multiple`, and concatenate
    them. Return them and a mask of the text, or None if there is no padding.
    """
    longest = -(-max(embed.shape[1] for embed in embeds) // multiple) * multiple
    if all(embed.shape[1] == longest for embed in embeds):
        return torch.cat(list(embeds)), None
    padded = [
        torch.nn.functional.pad(embed, (0, 0, 0, longest - embed.shape[1])) for embed in embeds
    ]
    lengths = torch.tensor([embed.shape[1] for embed in embeds], device=embeds[0].device)
    mask = (torch.arange(longest, device=embeds[0].device)[None] < lengths[:, None]).long()
    return torch.cat(padded), mask


def unscaled(latents: torch.Tensor, vae: Any) -> torch.Tensor:
    """Return latents [1, C, F, h, w] with the mean and the deviation that the VAE's decoder was
    trained with.
    """
    mean, deviation = (
        torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1).to(latents.device, latents.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    # Divide by the inverse, as the reference does, for the same last digits.
    return latents / (1.0 / deviation) + mean
