"""Pipelines beside those of the families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLLTXVideo,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from piecework.lab.diffusion_tokenizers import VOCAB_SIZE, clip_tokenizer, t5_tokenizer


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
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 3 without its largest text encoder, as it is often used."""
    path = tmp_path_factory.mktemp("sd3")
    torch.manual_seed(0)
    clip = clip_tokenizer()
    text = CLIPTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )
    transformer = SD3Transformer2DModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=64,
        pooled_projection_dim=64,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(4, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=clip,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of videos."""
    path = tmp_path_factory.mktemp("ltx")
    torch.manual_seed(0)
    pipeline = LTXPipeline(
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=16,
        ),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4,
            upsample_factor=(1,) * 4,
            patch_size=1,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ),
        tokenizer=t5_tokenizer(),
    )
    pipeline.save_pretrained(path)
    return path
