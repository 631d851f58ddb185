"""Scaling of rotary frequencies for contexts longer than those of the training.

There is a function for each type, as transformers' `modeling_rope_utils` defines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..config.model import ModelConfig

# Frequencies [rotary dim / 2], and the factor of cosines and sines.
Scaled = tuple[torch.Tensor, float]


def _default(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    """Return the frequencies as they are.

    The type "dynamic" stretches frequencies only in texts beyond `max_position_embeddings`, and no
    text is longer here.
    """
    return frequencies, 1.0


def _linear(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    return frequencies / float(config.rope_scaling["factor"]), 1.0


def _divided(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    return frequencies / _numbers(config.rope_scaling["factors"]), 1.0


def _llama3(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    """Scale as Llama 3.1 does.

    Waves longer than the original context are stretched by `factor`, short waves are kept, and
    those between are blended. Source: `apply_scaling` of the Llama 3.1 reference code. Parameters
    have the names of transformers and are rounded as there.
    """
    scaling = config.rope_scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths: torch.Tensor = 2 * math.pi / frequencies
    kept: torch.Tensor = (
        (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    ).clamp(0.0, 1.0)
    blended: torch.Tensor = (1 - kept) * frequencies / factor + kept * frequencies
    return blended, 1.0


def _yarn(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    """Scale by YaRN (arXiv:2309.00071).

    Dimensions that turn often within the original context are kept. Those that turn less than once
    are stretched by `factor`. Those between are blended.
    """
    scaling, dim = config.rope_scaling, config.rotary_dim
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Return the dimension that turns `turns` times within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    places = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((places - low) / (high - low)).clamp(0, 1)
    blended: torch.Tensor = frequencies / factor * (1 - kept) + frequencies * kept
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, everywhere = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = yarn_mscale(factor)
        if mscale and everywhere:
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, everywhere)
    return blended, float(attention)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor by which YaRN scales attention for contexts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    """Scale by LongRoPE (arXiv:2402.13753): by searched factors, which are listed twice.

    One list is for contexts up to the original length, the other for longer ones. The longest
    context that is served selects the list for all texts, because cached keys cannot change as a
    text grows.
    """
    scaling = config.rope_scaling
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    is_long = config.max_position_embeddings > original
    # Phi-3.5-MoE has a factor for each list.
    attention = scaling.get("long_mscale" if is_long else "short_mscale")
    if attention is None:
        attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = _numbers(scaling["long_factor" if is_long else "short_factor"])
    return frequencies / factors, float(attention)


def _proportional(frequencies: torch.Tensor, config: ModelConfig) -> Scaled:
    """Keep the first part of the frequencies (Gemma 4). The other numbers of a head stay."""
    scaling = config.rope_scaling
    kept = int(scaling["partial_rotary_factor"] * config.rotary_dim // 2)
    frequencies = frequencies / float(scaling.get("factor", 1.0))
    frequencies[kept:] = 0.0
    return frequencies, 1.0


def _numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


# By `ModelConfig.rope_type`.
SCALINGS: dict[str, Callable[[torch.Tensor, ModelConfig], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "divided": _divided,
    "proportional": _proportional,
}
