"""Writes diffusers pipelines with random weights: `python -m piecework.lab.diffusion_tiny FAMILY
FOLDER`.

All files of a published pipeline are there, including tokenizers. They are tiny by default. The
same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from .diffusion_tokenizers import (
    CLIP_LENGTH,
    VOCAB_SIZE,
    clip_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)

_TEXT_WIDTH = 32
_LATENT_CHANNELS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a transformer: `blocks` of each class, `heads` of `head_dim`. Raises `ValueError`."""

    blocks: int = 2
    heads: int = 2
    head_dim: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.heads < 1:
            raise ValueError("--blocks and --heads must be at least 1")
        if self.head_dim < 8 or self.head_dim % 8:
            raise ValueError(f"--head-dim must be a multiple of 8, got {self.head_dim}")

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """The dimensions of a head for frame, row and column, in the proportions of FLUX and
        Qwen-Image (16:56:56).
        """
        frame = max(2, self.head_dim // 8 // 2 * 2)
        rest = self.head_dim - frame
        rows = rest // 4 * 2
        return (frame, rows, rest - rows)


def make_flux(size: Size) -> Any:
    """Make a small FLUX.1-dev: CLIP and T5, embedded guidance, double and single blocks."""
    transformer = FluxTransformer2DModel(
        in_channels=4 * _LATENT_CHANNELS,
        num_layers=size.blocks,
        num_single_layers=size.blocks,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=_TEXT_WIDTH,
        pooled_projection_dim=_TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=size.rope_axes,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 8, 8, 8),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=1024,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    clip = clip_tokenizer()
    text = CLIPTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )
    t5 = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=_TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


def make_qwen_image(size: Size) -> Any:
    """Make a small Qwen-Image: a Qwen2.5-VL text encoder, true classifier-free guidance."""
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * _LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=size.blocks,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=_TEXT_WIDTH,
        axes_dims_rope=size.rope_axes,
    )
    tokenizer = qwen_tokenizer()
    text = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 1e6,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
        },
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=Qwen2_5_VLForConditionalGeneration(text),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def make_wan(size: Size) -> Any:
    """Make a small Wan 2.2: two transformers, of which the second takes the steps with little
    noise.
    """

    def transformer() -> Any:
        return WanTransformer3DModel(
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            text_dim=_TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=2 * size.heads * size.head_dim,
            num_layers=size.blocks,
            cross_attn_norm=True,
        )

    text = UMT5Config(
        vocab_size=VOCAB_SIZE,
        d_model=_TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(text),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=_LATENT_CHANNELS, dim_mult=[1, 2, 2, 2], num_res_blocks=1
        ),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=transformer(),
        transformer_2=transformer(),
        boundary_ratio=0.875,
    )


FAMILIES: dict[str, Callable[[Size], Any]] = {
    "flux": make_flux,
    "qwen-image": make_qwen_image,
    "wan": make_wan,
}


def make_pipeline_folder(
    path: Path, family: str, size: Size | None = None, *, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a pipeline's folder and return its path."""
    size = size or Size()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(size.seed)
        pipeline = FAMILIES[family](size)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                _draw_weights(part)
                if dtype != torch.float32:
                    part.to(dtype)
    pipeline.save_pretrained(path)
    # Written by newer libraries only, and machine-dependent.
    (path / "README.md").unlink(missing_ok=True)
    return path


@torch.no_grad()
def _draw_weights(module: torch.nn.Module) -> None:
    """Draw weights that keep the scale of activations, so that every part affects the pixels."""
    for name, weight in module.named_parameters():
        if weight.ndim >= 2 and not name.endswith("scale_shift_table"):
            fan_in = weight[0].numel() if "embedding" not in name and "shared" not in name else 1
            weight.normal_(0.0, 1 / math.sqrt(fan_in))
        elif name.endswith(("bias", "scale_shift_table")):
            weight.normal_(0.0, 0.1)
        else:
            weight.normal_(1.0, 0.1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.diffusion_tiny", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    for name, text in {
        "blocks": "transformer blocks of each class",
        "heads": "attention heads",
        "head_dim": "dimensions of a head, a multiple of 8",
        "seed": "seed of the weights",
    }.items():
        default = getattr(Size(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text}; default: {default}",
        )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="number format of the files",
    )
    arguments = vars(parser.parse_args(argv))
    family, folder, dtype = (
        arguments.pop("family"),
        arguments.pop("folder"),
        getattr(torch, arguments.pop("dtype")),
    )
    try:
        make_pipeline_folder(folder, family, Size(**arguments), dtype=dtype)
    except ValueError as error:
        parser.error(str(error))
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(
        json.dumps(
            {"folder": str(folder), "family": family, "mebibytes": round(num_bytes / 2**20, 1)}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
