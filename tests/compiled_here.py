"""In place of the process that compiles a model's pieces: this one, where faults can be seeded and simulated devices are."""

from __future__ import annotations

import torch

from piecework.kernels.detect import detect
from piecework.runtime.config import EngineConfig
from piecework.runtime.model_config import ModelConfig
from piecework.runtime.pieces import install, installer
from piecework.runtime.weights.loader import empty_model
from piecework.runtime.weights.packing import Kinds


class CompiledHere:
    """To be set in place of `graph_startup.start`. Two looks later its pieces are in the cache."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kinds: Kinds) -> None:
        assert not kinds, "these models are in float32"
        platform = detect(config.device)
        install(installer(config, platform), empty_model(model_config, dtype, platform.device()), model_config, dtype)
        self._looks = 0

    def poll(self) -> int | None:
        self._looks += 1
        return 0 if self._looks > 2 else None

    def wait(self) -> int:
        self._looks = 2
        return 0

    def terminate(self) -> None:
        """There is no process to end."""
