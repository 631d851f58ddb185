"""A server as an application of Ray Serve, with replicas that Ray places, scales and replaces.

    serve run piecework.cli.ray:build model-path=smollm2-135m num-replicas=2

Arguments are the flags of `piecework serve`, and those of `Placement`. In a file of Ray Serve they
stand under `args`; options that Ray has for deployments, under `deployments` as for any application
(docs/ray.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
_ROUTERS = (
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
"""Where Ray's prefix-aware router is found; the public place needs vLLM or SGLang to be there."""
_RUNNING = 256
"""Sequences at once that an engine is taken to run until it has said how many."""
_INGRESS_REQUESTS = 100_000
_ELSEWHERE = "it keeps files that one server reads, and a replica cannot see another's"
_NOT_HERE = {
    "host": "Ray listens, see its http_options",
    "port": "Ray listens, see its http_options",
    "nnodes": "Ray places a replica on one machine",
    "batch_dir": _ELSEWHERE,
    "responses_store": _ELSEWHERE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How Ray runs replicas. Raises `ValueError` with a remedy."""

    num_replicas: int = option(1, "replicas, where max-replicas is not given", group=_GROUP)
    min_replicas: int = option(1, "fewest replicas", group=_GROUP)
    max_replicas: int | None = option(
        None, "most replicas; given, Ray scales them by what engines run and queue", group=_GROUP
    )
    target_ongoing_requests: float = option(
        32.0, "sequences that a replica is to run and queue, for scaling", group=_GROUP
    )
    upscale_delay: float = option(
        30.0, "seconds of more load before a replica is added", group=_GROUP
    )
    downscale_delay: float = option(
        600.0, "seconds of less load before a replica is taken away", group=_GROUP
    )
    replica_cpus: float = option(1.0, "cores of a replica, and threads of its engine", group=_GROUP)
    replica_gpus: float = option(0.0, "GPUs of a replica: tp-size of them", group=_GROUP)
    routing: str = option(
        "prefix",
        "which replica gets a request: prefix, one that had its beginning; load, the least busy",
        group=_GROUP,
        choices=("prefix", "load"),
    )

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max-replicas {self.max_replicas} is less than min-replicas {self.min_replicas}"
            )
        if min(self.upscale_delay, self.downscale_delay) < 0:
            raise ValueError("upscale-delay and downscale-delay are 0 or more seconds")

    def options(self, config: AnyServerConfig) -> dict[str, Any]:
        """What Ray calls the options of the replicas' deployment."""
        resources = {"CPU": self.replica_cpus, "GPU": self.replica_gpus}
        return {
            "ray_actor_options": {"num_cpus": self.replica_cpus, "num_gpus": self.replica_gpus},
            # Ranks are processes of the replica: one bundle keeps them on its machine.
            "placement_group_bundles": [
                {name: count for name, count in resources.items() if count}
            ],
            "max_ongoing_requests": config.max_queued_requests + _RUNNING,
            "graceful_shutdown_timeout_s": config.drain_timeout,
            **self._count(),
            **self._router(),
        }

    def _count(self) -> dict[str, Any]:
        if self.max_replicas is None:
            return {"num_replicas": self.num_replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
                "upscale_delay_s": self.upscale_delay,
                "downscale_delay_s": self.downscale_delay,
                "policy": {"policy_function": queue_length},
            }
        }

    def _router(self) -> dict[str, Any]:
        if self.routing == "load":
            return {}
        return {
            "request_router_config": {
                "request_router_class": _prefix_router(),
                "request_router_kwargs": {"imbalanced_threshold": 16, "do_eviction": True},
            }
        }


def _prefix_router() -> str:
    for module in _ROUTERS:
        try:
            return f"{module}.{import_module(module).PrefixCacheAffinityRouter.__name__}"
        except (ImportError, AttributeError):
            continue
    raise ValueError("this version of Ray has no prefix-aware router; take routing=load")


def build(args: Mapping[str, Any]) -> Application:
    """The application of these arguments. Raises `ValueError` with a remedy."""
    config, placement = read_arguments(args)
    engines = serve.deployment(Replica, name=_ENGINE, **placement.options(config))
    door = serve.deployment(
        serve.ingress(ingress)(), name="Ingress", max_ongoing_requests=_INGRESS_REQUESTS
    )
    return door.bind(engines.bind(config))


def ingress() -> Ingress:
    """The ASGI application of the deployment that takes HTTP requests, made where it runs."""
    return Ingress(serve.get_deployment_handle(_ENGINE))


class _Parser(ArgumentParser):
    """Raises instead of ending the process, which is one of Ray's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_arguments(args: Mapping[str, Any]) -> tuple[AnyServerConfig, Placement]:
    """The settings of a server and of its replicas. Raises `ValueError` with a remedy."""
    parser = _Parser(prog="piecework.cli.ray:build", add_help=False)
    serve_command.describe(parser)
    add_config_arguments(parser, Placement)
    arguments = parse(parser, list(_as_flags(args)), os.environ)
    placement = Placement(**given(arguments, Placement))
    for name, reason in _NOT_HERE.items():
        if name in arguments:
            raise ValueError(f"{name.replace('_', '-')}: {reason}; leave it out")
    if fleet_config(arguments, serve_command.serving_config) is not None:
        raise ValueError(
            "several models: a replica has one; give each model an application of its own"
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


def _as_flags(args: Mapping[str, Any]) -> Iterator[str]:
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value is True:
            yield f"--{flag}"
        elif value is False:
            yield f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}={value}"
