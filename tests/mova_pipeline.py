"""A tiny pipeline of MOVA's shape: a tower for video and one for audio, whose blocks run in turn,
and a bridge that passes between them after each block. No tower is called as a whole.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH, BLOCKS, TOKENS = 16, 3, 12


class TowerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)) + shift)


class BridgeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_video, self.to_audio = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, video: torch.Tensor, audio: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heard = self.to_video(audio.mean(1, keepdim=True))
        seen = self.to_audio(video.mean(1, keepdim=True))
        return video + heard, audio + seen


class Tower(nn.Module):
    _repeated_blocks = ("TowerBlock",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TowerBlock() for _ in range(BLOCKS))
        self.config = SimpleNamespace(sample_size=4)


class Bridge(nn.Module):
    """Names no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BridgeLayer() for _ in range(BLOCKS))


class MovaPipeline:
    """What `WholePipeline` needs of a pipeline of diffusers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.video_dit, self.audio_dit, self.dual_tower_bridge = Tower(), Tower(), Bridge()

    @property
    def components(self) -> dict[str, Any]:
        return {
            "video_dit": self.video_dit,
            "audio_dit": self.audio_dit,
            "dual_tower_bridge": self.dual_tower_bridge,
            "text_encoder": nn.Linear(1, 1),
            "scheduler": None,
        }

    def to(self, device: str) -> MovaPipeline:
        for part in (self.video_dit, self.audio_dit, self.dual_tower_bridge):
            part.to(device)
        return self

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        num_inference_steps: int = 2,
        generator: torch.Generator | None = None,
        output_type: str = "np",
        return_dict: bool = False,
    ) -> tuple[Any]:
        device = self.video_dit.blocks[0].mix.weight.device
        video, audio = (
            torch.randn(1, length, WIDTH, generator=generator).to(device)
            for length in (TOKENS, TOKENS // 2)
        )
        for step in range(num_inference_steps):
            shift = torch.full((1, 1, WIDTH), step / 10, device=device)
            for first, second, layer in zip(
                self.video_dit.blocks,
                self.audio_dit.blocks,
                self.dual_tower_bridge.layers,
                strict=True,
            ):
                video, audio = first(video, shift), second(audio, shift)
                video, audio = layer(video, audio)
        return ((video[..., :3].sigmoid().cpu().reshape(1, 1, 3, 4, 3)).numpy(),)
