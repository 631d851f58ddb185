"""A server as a Ray Serve application. Ray places, scales and replaces its replicas.

    serve run piecework.cli.ray:build model-path=smollm2-135m num-replicas=2

Arguments are the flags of `piecework serve` and of `Placement`. In a Ray Serve file they stand
under `args`, and Ray's own deployment options under `deployments` (docs/ray.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NoReturn

from ray import serve
from ray.serve import Application

from ..runtime.config.options import option
from ..server.config.server import BatchServerConfig, ServerConfig
from ..server.ray_serve.autoscaling import queue_length
from ..server.ray_serve.ingress import Ingress
from ..server.ray_serve.replica import Replica
from ..server.services import AnyServerConfig
from . import serve as serve_command
from .core.flags import ArgumentParser, add_config_arguments, given
from .core.settings import parse
from .fleet import fleet_config

_GROUP = "placement"
_ENGINE = "Engine"
# Modules with Ray's prefix-aware router. The public one needs vLLM or SGLang.
_ROUTERS = (
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
_RUNNING = 256  # Assumed running sequences of an engine before it reports its limit.
_INGRESS_REQUESTS = 100_000
_ELSEWHERE = "it keeps files on one machine, and replicas do not share them"
_ONE = "a request that changes a running engine reaches one replica only"
_NOT_HERE = {
    "host": "Ray opens the port; set it in Ray's http_options",
    "port": "Ray opens the port; set it in Ray's http_options",
    "nnodes": "Ray places each replica on one machine",
    "batch_dir": _ELSEWHERE,
    "responses_store": _ELSEWHERE,
    "enable_sleep_mode": _ONE,
    "lora_root": f"{_ONE}: name its adapters in lora-modules",
    "weights_root": _ONE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How Ray runs the replicas. Raises `ValueError`."""

    num_replicas: int = option(1, "number of replicas, if max-replicas is not given", group=_GROUP)
    min_replicas: int = option(1, "minimum number of replicas", group=_GROUP)
    max_replicas: int | None = option(
        None,
        "maximum number of replicas; if given, Ray scales by running and queued sequences",
        group=_GROUP,
    )
    target_ongoing_requests: float = option(
        32.0, "running and queued sequences per replica that scaling aims at", group=_GROUP
    )
    upscale_delay: float = option(
        30.0, "seconds of higher load before a replica is added", group=_GROUP
    )
    downscale_delay: float = option(
        600.0, "seconds of lower load before a replica is removed", group=_GROUP
    )
    replica_cpus: float = option(
        1.0, "cores of a replica, which are also the threads of its engine", group=_GROUP
    )
    replica_gpus: float = option(0.0, "GPUs of a replica; give tp-size", group=_GROUP)
    routing: str = option(
        "prefix",
        "replica of a request: prefix (one that has seen its prefix) or load (the least busy)",
        group=_GROUP,
        choices=("prefix", "load"),
    )

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max-replicas {self.max_replicas} is less than min-replicas {self.min_replicas}"
            )
        if min(self.upscale_delay, self.downscale_delay) < 0:
            raise ValueError("upscale-delay and downscale-delay must be at least 0 seconds")

    def options(self, config: AnyServerConfig) -> dict[str, Any]:
        """Return the options of the replicas' Ray deployment."""
        resources = {"CPU": self.replica_cpus, "GPU": self.replica_gpus}
        options = {
            "ray_actor_options": {"num_cpus": self.replica_cpus, "num_gpus": self.replica_gpus},
            # One bundle keeps all ranks, which are processes of the replica, on one machine.
            "placement_group_bundles": [
                {name: count for name, count in resources.items() if count}
            ],
            "max_ongoing_requests": config.max_queued_requests + _RUNNING,
            "graceful_shutdown_timeout_s": config.drain_timeout,
        }
        if self.max_replicas is None:
            options["num_replicas"] = self.num_replicas
        else:
            options["autoscaling_config"] = {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
                "upscale_delay_s": self.upscale_delay,
                "downscale_delay_s": self.downscale_delay,
                "policy": {"policy_function": queue_length},
            }
        if self.routing != "load":
            options["request_router_config"] = {
                "request_router_class": _prefix_router(),
                "request_router_kwargs": {"imbalanced_threshold": 16, "do_eviction": True},
            }
        return options


def _prefix_router() -> str:
    for module in _ROUTERS:
        try:
            return f"{module}.{import_module(module).PrefixCacheAffinityRouter.__name__}"
        except (ImportError, AttributeError):
            continue
    raise ValueError("this version of Ray has no prefix-aware router; set routing=load")


def build(args: Mapping[str, Any]) -> Application:
    """Return the Ray application for these arguments. Raises `ValueError`."""
    config, placement = read_arguments(args)
    engines = serve.deployment(Replica, name=_ENGINE, **placement.options(config))
    door = serve.deployment(
        serve.ingress(ingress)(), name="Ingress", max_ongoing_requests=_INGRESS_REQUESTS
    )
    return door.bind(engines.bind(config))


def ingress() -> Ingress:
    """Return the ASGI application for HTTP requests. Ray calls this in the deployment's process."""
    return Ingress(serve.get_deployment_handle(_ENGINE))


class _Parser(ArgumentParser):
    """A parser that raises `ValueError` instead of exiting, because the process is Ray's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_arguments(args: Mapping[str, Any]) -> tuple[AnyServerConfig, Placement]:
    """Return the settings of the server and of its replicas. Raises `ValueError`."""
    parser = _Parser(prog="piecework.cli.ray:build", add_help=False)
    serve_command.describe(parser)
    add_config_arguments(parser, Placement)
    flags = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value is True:
            flags.append(f"--{flag}")
        elif value is False:
            flags.append(f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    arguments = parse(parser, flags, os.environ)
    placement = Placement(**given(arguments, Placement))
    for name, reason in _NOT_HERE.items():
        if name in arguments:
            raise ValueError(f"{name.replace('_', '-')}: {reason}; leave it out")
    if fleet_config(arguments, serve_command.serving_config) is not None:
        raise ValueError(
            "a replica serves one model, but several are given; give each model its own application"
        )
    config = serve_command.serving_config(arguments)
    own: dict[str, Any] = {}
    if isinstance(config, BatchServerConfig):
        own["batch_dir"] = "none"
    if isinstance(config, ServerConfig):
        own["responses_store"] = "off"
    if config.engine.num_threads is None and placement.replica_cpus >= 1:
        own["engine"] = replace(config.engine, num_threads=int(placement.replica_cpus))
    return replace(config, **own), placement
