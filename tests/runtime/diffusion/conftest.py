"""A pipeline beside those of the families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from transformers import T5Config, T5EncoderModel

from piecework.bench.diffusion_tokenizers import VOCAB_SIZE, t5_tokenizer


@pytest.fixture(scope="session")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that no family of ours knows."""
    path = tmp_path_factory.mktemp("pixart")
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        use_additional_conditions=False,
    )
    pipeline = PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=T5EncoderModel(T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
        vae=AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(path)
    return path
