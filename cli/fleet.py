"""Several models in one server: repeated `--model-path NAME=PATH`, or `models:` of `--config`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..runtime.config.engine import EngineConfig
from ..runtime.diffusion.config import DiffusionConfig
from ..runtime.pooling.config import PoolingConfig
from ..runtime.speech.config import SpeechConfig
from ..server.config.fleet import FleetConfig, FleetLimits, MemberConfig, of_all_models
from ..server.config.images import ImageServerConfig
from ..server.config.pooling import PoolingServerConfig
from ..server.config.server import ServerConfig
from ..server.config.speech import SpeechServerConfig
from .core.flags import ArgumentParser, add_config_arguments, check_model, given, option_names
from .core.settings import PREFIX, ModelSettings, Setting, with_sources

KINDS: tuple[type, ...] = (
    EngineConfig,
    ServerConfig,
    DiffusionConfig,
    ImageServerConfig,
    PoolingConfig,
    PoolingServerConfig,
    SpeechConfig,
    SpeechServerConfig,
)
AnyServerConfig = ServerConfig | ImageServerConfig | PoolingServerConfig | SpeechServerConfig
_OWN = option_names(MemberConfig)
# Settings that are not copied to each model, because the fleet applies them. Keys are not either.
_ONCE = ("cors_origins", "log_requests", "otlp_traces_endpoint", "model_path", "runner")
# The fleet keeps batches and responses, the servers of its models do not.
_NOT_KEPT = {"batch_dir": "none", "responses_store": "memory"}


def models_parser(instead_of: Callable[[str], str | None]) -> ArgumentParser:
    """Return a parser of the keys that an entry of `models:` may have.

    `instead_of` returns advice for flags of other servers.
    """
    parser = ArgumentParser(prog="piecework serve", add_help=False)
    add_config_arguments(parser, *KINDS, MemberConfig, without=of_all_models())
    parser.add_argument("--name", dest="served_model_name", metavar="NAME")
    for_all = {f"--{name.replace('_', '-')}" for name in of_all_models()}

    def instead(flag: str) -> str | None:
        return "it holds for all models; move it out of `models:`" if flag in for_all else None

    parser.instead_of = lambda flag: instead(flag) or instead_of(flag)
    return parser


def fleet_config(
    arguments: argparse.Namespace,
    serving_config: Callable[[argparse.Namespace], AnyServerConfig],
) -> FleetConfig | None:
    """Return the settings of a server of several models, or None if there is only one model.

    `serving_config` returns the settings of a server of one model. All settings are checked before
    anything starts. Raises `ValueError` with the wrong line.
    """
    entries = model_entries(arguments)
    if not entries:
        for name in given(arguments, FleetLimits):
            raise ValueError(
                f"--{name.replace('_', '-')} is for several models; leave it out, or name models "
                "with --model-path NAME=PATH"
            )
        return None
    for name in ("served_model_name", "runner"):
        if name in arguments:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} is for one model; with several, set it for each in `models:`"
            )
    members, seen = [], dict[str, str]()
    for entry in entries:
        try:
            member = _member(arguments, entry, serving_config)
        except ValueError as error:
            sources = {name: setting.source for name, setting in entry.settings.items()}
            message = with_sources(error, argparse.Namespace(sources=sources))
            raise ValueError(f"{entry.where}: {message}") from None
        if member.name in seen:
            raise ValueError(
                f"{entry.where}: the name {member.name} is already used at {seen[member.name]}; "
                "give one of the models another name"
            )
        seen[member.name] = entry.where
        members.append(member)
    _check_fits_one(arguments, members)
    return FleetConfig(
        **{
            name: value
            for name, value in given(arguments, ServerConfig).items()
            if name in of_all_models() or name == "max_queued_requests"
        },
        served_model_name="fleet",
        limits=FleetLimits(**given(arguments, FleetLimits)),
        members=tuple(members),
    )


def model_entries(arguments: argparse.Namespace) -> list[ModelSettings]:
    """Return the settings of each of several models; empty for one model. Raises `ValueError`."""
    entries = list(getattr(arguments, "models", []))
    paths: list[str] = getattr(arguments, "model_paths", [])
    if entries and "model_path" in arguments:
        raise ValueError(
            "--model-path and `models:` in the file of --config both name models; give one of them"
        )
    if len(paths) > 1 or any("=" in path and not Path(path).exists() for path in paths):
        return [_named(path) for path in paths]
    return entries


def _check_fits_one(arguments: argparse.Namespace, members: list[MemberConfig]) -> None:
    """Raise `ValueError` for a flag that fits none of the models."""
    kinds = {type(config) for each in members for config in (each.server, each.server.engine)}
    known = of_all_models().union(option_names(FleetLimits), *map(option_names, kinds))
    for name in vars(arguments):
        is_variable = arguments.sources.get(name, "").startswith(
            PREFIX
        )  # Maybe for another command.
        if not is_variable and name not in known and any(name in option_names(k) for k in KINDS):
            raise ValueError(f"--{name.replace('_', '-')} fits none of these models; leave it out")


def _named(path: str) -> ModelSettings:
    """Parse `NAME=PATH`. Without NAME, the last part of the path is the name."""
    name, found, rest = path.partition("=")
    where = f"--model-path {path}"
    if not found or Path(path).exists():
        return ModelSettings({"model_path": Setting(path, where)}, where)
    if not name.strip():
        raise ValueError(f"{where}: the name before = is empty")
    settings = {"served_model_name": Setting(name, where), "model_path": Setting(rest, where)}
    return ModelSettings(settings, where)


def _member(
    arguments: argparse.Namespace,
    entry: ModelSettings,
    serving_config: Callable[[argparse.Namespace], AnyServerConfig],
) -> MemberConfig:
    own = {name: one.value for name, one in entry.settings.items()}
    if "model_path" not in own:
        raise ValueError("model_path is missing; give a folder, a .gguf file or a hub id")
    about = {name: own.pop(name) for name in _OWN if name in own}
    # A model's own flags must fit it. Flags given for all models apply where they fit.
    alone = serving_config(argparse.Namespace(**own))
    known = option_names(type(alone)) | option_names(type(alone.engine))
    for_all = {
        name: value
        for name, value in vars(arguments).items()
        if name in known and name not in _ONCE and not name.startswith("api_key")
    }
    kept = {name: value for name, value in _NOT_KEPT.items() if name in known}
    config = serving_config(argparse.Namespace(**{**for_all, **kept, **own}))
    if isinstance(config, ServerConfig):
        if config.engine.nnodes > 1:
            raise ValueError(
                "--nnodes is not supported with several models; run one server for this model"
            )
        check_model(config.engine)
    name = config.served_model_name
    if name == "default" or "," in name or len(name) > 200 or not name.isprintable():
        raise ValueError(f"{name!r:.80} cannot be a model's name; choose another")
    return MemberConfig(name=name, server=config, **about)
