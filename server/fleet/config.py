"""The settings of a server of several models; imports nothing heavy, for it also makes command-line
flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ...runtime.config.options import option
from ..config.server import BatchServerConfig, ServerConfig
from ..images.config import ImageServerConfig
from ..pooling.config import PoolingServerConfig

FLEET = "several models"
_OF_A_MODEL = frozenset({"served_model_name", "max_queued_requests", "watchdog_timeout"})
_RESPONSES = ("responses_store", "responses_store_size", "responses_store_days")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """One model. `server`: what it would be served with alone, under its name in the fleet; what
    `of_all_models` names is not asked there.
    """

    name: str
    server: ServerConfig | ImageServerConfig | PoolingServerConfig
    preload: bool = option(
        False, "load this model when the server starts, not at its first request", group=FLEET
    )
    pinned: bool = option(
        False, "never unload this model to make room, nor because it is idle", group=FLEET
    )
    idle_unload: float | None = option(
        None,
        "seconds without a request after which this model is unloaded; default: --idle-unload",
        group=FLEET,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        _check_seconds(self.idle_unload)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """How much may be loaded at once. Raises `ValueError` with a remedy."""

    fleet_memory: float | None = option(
        None,
        "GiB that all loaded models may take together; default: what the machine has free at the "
        "start",
        group=FLEET,
        metavar="GIB",
    )
    max_loaded_models: int | None = option(
        None,
        "models that may be loaded at once; default: as many as fit the memory",
        group=FLEET,
        metavar="N",
    )
    idle_unload: float = option(
        0.0,
        "seconds without a request after which a model is unloaded; 0: only to make room",
        group=FLEET,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        _check_seconds(self.idle_unload)
        if self.fleet_memory is not None and not 0 < self.fleet_memory < float("inf"):
            raise ValueError(f"--fleet-memory must be more than 0 GiB, got {self.fleet_memory}")
        if self.max_loaded_models is not None and self.max_loaded_models < 1:
            raise ValueError(
                f"--max-loaded-models must be at least 1, got {self.max_loaded_models}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(ServerConfig):
    """Settings of a server of several models. Of those that it has as any server, it is
    `of_all_models` that hold for it. Raises `ValueError` with a remedy.
    """

    limits: FleetLimits = field(default_factory=FleetLimits)
    members: tuple[MemberConfig, ...] = ()

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        pinned, most = [each.name for each in self.members if each.pinned], self.limits
        if most.max_loaded_models is not None and len(pinned) > most.max_loaded_models:
            raise ValueError(
                f"{', '.join(pinned)} are pinned, more than --max-loaded-models "
                f"{most.max_loaded_models}; raise it, or unpin some"
            )


def of_all_models() -> frozenset[str]:
    """The names of the settings that a server has once, however many models it has."""
    common = {each.name for each in fields(BatchServerConfig)} - _OF_A_MODEL - {"engine"}
    return frozenset(common | {*_RESPONSES, "fleet_memory", "max_loaded_models"})


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"--idle-unload must be 0 or more seconds, got {seconds}")
