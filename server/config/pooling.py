"""The settings of a server of a pooling model.

The command line makes flags from them, so this file imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...runtime.config.options import option
from ...runtime.pooling.config import PoolingConfig
from ..engine.spawn import POOLING_MODEL
from .server import RUNNERS, SERVER, BatchServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingServerConfig(BatchServerConfig):
    """Settings of a server of a pooling model. Raises `ValueError` for invalid values."""

    engine_command = POOLING_MODEL
    runner: str = option(
        "auto",
        "use of the model; auto: decided by its modules.json or its architecture",
        group=SERVER,
        choices=RUNNERS,
    )
    engine: PoolingConfig = field(default_factory=PoolingConfig)
