"""The settings of a server of several models.

The command line makes flags from them, so this file imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ...runtime.config.options import option
from .images import ImageServerConfig
from .pooling import PoolingServerConfig
from .server import BatchServerConfig, ServerConfig
from .speech import SpeechServerConfig

FLEET = "several models"
_OF_A_MODEL = frozenset({"served_model_name", "max_queued_requests", "watchdog_timeout"})
_TEXT = (
    "responses_store",
    "responses_store_size",
    "responses_store_days",
    "sse_ping_interval",
    "mcp_allow",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """One model of the fleet.

    `server` holds the settings with which the model would be served alone, with its name in the
    fleet. The settings that `of_all_models` names are not read from there.
    """

    name: str
    server: ServerConfig | ImageServerConfig | PoolingServerConfig | SpeechServerConfig
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
    """How much may be loaded at once. Raises `ValueError` for invalid values."""

    fleet_memory: float | None = option(
        None,
        "GiB that all loaded models may take together; default: the memory that is free at the "
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
    """Settings of a server of several models. Raises `ValueError` for invalid values.

    Only those inherited settings count that `of_all_models` names.
    """

    limits: FleetLimits = field(default_factory=FleetLimits)
    members: tuple[MemberConfig, ...] = ()

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        pinned, limits = [each.name for each in self.members if each.pinned], self.limits
        if limits.max_loaded_models is not None and len(pinned) > limits.max_loaded_models:
            raise ValueError(
                f"{', '.join(pinned)} are pinned, more than --max-loaded-models "
                f"{limits.max_loaded_models}; raise it, or unpin some models"
            )

    def idle_seconds(self, member: MemberConfig) -> float:
        """Return the seconds without a request after which a model is unloaded; 0: never."""
        return self.limits.idle_unload if member.idle_unload is None else member.idle_unload


def of_all_models() -> frozenset[str]:
    """Return the names of the settings that hold for the server, not for one model."""
    common = {each.name for each in fields(BatchServerConfig)} - _OF_A_MODEL - {"engine"}
    return frozenset(common | {*_TEXT, "fleet_memory", "max_loaded_models"})


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"--idle-unload must be 0 or more seconds, got {seconds}")
