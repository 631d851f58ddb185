"""The settings of a server of vectors or scores; imports nothing heavy, for it also makes
command-line flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...runtime.config.options import option
from ...runtime.pooling.config import PoolingConfig
from ..config.server import RUNNERS, SERVER, BatchServerConfig
from ..engine.spawn import POOLING_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingServerConfig(BatchServerConfig):
    """Settings of a server of an embedder or a reranker. Raises `ValueError` with a remedy."""

    engine_command = POOLING_MODEL
    runner: str = option(
        "auto",
        "use of the model; auto: decided by its modules.json or its architecture",
        group=SERVER,
        choices=RUNNERS,
    )
    engine: PoolingConfig = field(default_factory=PoolingConfig)
