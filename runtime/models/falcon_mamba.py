"""FalconMamba (arXiv:2410.05355): Mamba with norms of the inputs of dt, b and c."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..config.model import ModelConfig
from ..layers.decoder import MixerLayer
from ..layers.norm import UnweightedRMSNorm
from .hybrid import MambaConfig, mamba_mixer
from .mamba import MambaForCausalLM

ARCHITECTURE = "FalconMambaForCausalLM"
MODEL_TYPE = "falcon_mamba"
GGUF_ARCHITECTURE = "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    mixer_rms_eps: float = 1e-6


class FalconMambaForCausalLM(MambaForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = FalconMambaConfig

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        return bool(get("ssm.dt_b_c_rms", False))

    def make_layer(self, layer: int) -> nn.Module:
        config = self.config

        def norm(size: int) -> nn.Module:
            """It has no weights, so that it fits any size."""
            return UnweightedRMSNorm(config.mixer_rms_eps)

        return MixerLayer(config, mamba_mixer(config, layer, config.intermediate_size, norm))
