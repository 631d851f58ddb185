"""All ops of `kernels.reference`, `recurrent_steps`, `recurrent_prompts` and `plain_sampling` that
have C++ kernels.
"""

from __future__ import annotations

import torch

from .lora import lora
from .quantize import (
    add_rms_norm,
    add_rms_norm_quantize_dynamic,
    add_rms_norm_quantize_static,
    norm_rotary_embedding,
    quantize_dynamic,
    quantize_static,
    rms_norm,
    rms_norm_quantize_dynamic,
    rms_norm_quantize_static,
    rotary_embedding,
    silu_and_mul,
    silu_and_mul_quantize_dynamic,
    silu_and_mul_quantize_static,
)
from .recurrent import (
    conv_prompts,
    conv_step,
    gated_delta_prompts,
    gated_delta_step,
    mamba2_prompts,
    mamba2_step,
    selective_scan_prompts,
    selective_scan_step,
)
from .sampling import argmax, mask_logits, sample_filtered, sample_plain, softmax
from .whole_attention import attend_all

DTYPES = (torch.bfloat16,)  # Supported dtypes of activations. The reference computes others.

__all__ = [
    "DTYPES",
    "add_rms_norm",
    "add_rms_norm_quantize_dynamic",
    "add_rms_norm_quantize_static",
    "argmax",
    "attend_all",
    "conv_prompts",
    "conv_step",
    "gated_delta_prompts",
    "gated_delta_step",
    "lora",
    "mamba2_prompts",
    "mamba2_step",
    "mask_logits",
    "norm_rotary_embedding",
    "quantize_dynamic",
    "quantize_static",
    "rms_norm",
    "rms_norm_quantize_dynamic",
    "rms_norm_quantize_static",
    "rotary_embedding",
    "sample_filtered",
    "sample_plain",
    "selective_scan_prompts",
    "selective_scan_step",
    "silu_and_mul",
    "silu_and_mul_quantize_dynamic",
    "silu_and_mul_quantize_static",
    "softmax",
]
