"""`piecework config`: print the settings of a server and the source of each value."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from ..runtime.config.engine import EngineConfig
from ..server.config.fleet import FleetConfig, FleetLimits, of_all_models
from . import serve
from .core.flags import option_names
from .fleet import fleet_config, model_entries

_SECRETS = ("api_key",)
# Texts that need no quotes in YAML.
_PLAIN = re.compile(r"[\w./+][\w./+*-]*(:[\w./+*-]+)*")


class Row(NamedTuple):
    """One setting: its name, its value (None if the start chooses it) and its source."""

    name: str
    value: Any
    source: str


def add_parser(commands: Any) -> None:
    config = commands.add_parser(
        "config",
        help="print the settings that serve would use, and the source of each",
        add_help=False,
    )
    serve.describe(config)
    config.description = (
        "Print every setting that `piecework serve` would use on this machine, and its source: a "
        "flag, a variable, a line of a file, the default, or chosen for this machine. The output "
        "is a valid file for --config. Keys are not printed."
    )
    config.epilog = None
    config.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    config.set_defaults(func=_config, parser=config)


def _config(arguments: argparse.Namespace) -> int:
    fleet = fleet_config(arguments, serve.serving_config)
    if fleet is not None:
        rows, models = _rows_of_several(arguments, fleet)
    else:
        config = serve.serving_config(arguments)
        rows, models = list(_rows(arguments, config.engine, config)), []
    if arguments.json:
        shown: dict[str, Any] = _as_json(rows)
        print(
            json.dumps(shown | ({"models": [*map(_as_json, models)]} if models else {}), indent=1)
        )
        return 0
    _print_yaml(rows)
    if models:
        print("models:")
    for name, *others in models:
        print(f"- name:{_yaml(name.value)}  # {name.source}")
        _print_yaml(others, "  ")
    return 0


def _as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {row.name: {"value": row.value, "source": row.source} for row in rows}


def _print_yaml(rows: Sequence[Row], indent: str = "") -> None:
    for row in rows:
        if row.name in _SECRETS and row.value is not None:
            print(f"{indent}# {row.name} is set, but not shown  # {row.source}")
        else:
            print(f"{indent}{row.name}:{_yaml(row.value)}  # {row.source}")


def _rows_of_several(
    arguments: argparse.Namespace, fleet: FleetConfig
) -> tuple[list[Row], list[list[Row]]]:
    """Return the rows of the server, and the rows of each model, whose name comes first."""
    limits = option_names(FleetLimits)
    common = of_all_models() | limits | {"max_queued_requests"}
    for_all = {name: value for name, value in vars(arguments).items() if name not in limits}
    rows = [row for row in _rows(arguments, fleet, fleet.limits) if row.name in common]
    models = []
    for member, entry in zip(fleet.members, model_entries(arguments), strict=True):
        own = {name: one.value for name, one in entry.settings.items()}
        sources = {name: one.source for name, one in entry.settings.items()}
        merged = argparse.Namespace(**{**for_all, **own})
        merged.sources = arguments.sources | sources
        name = Row("name", member.name, sources.get("served_model_name", "default"))
        found = _rows(merged, member.server.engine, member.server, member)
        skipped = of_all_models() | {"served_model_name"}
        models.append([name, *(row for row in found if row.name not in skipped)])
    return rows, models


def _rows(arguments: argparse.Namespace, *configs: Any) -> Iterator[Row]:
    """Yield every setting once, with its value after validation."""
    sources: dict[str, str] = arguments.sources
    given, seen = vars(arguments), set()
    for config in configs:
        chosen = _chosen(config) if isinstance(config, EngineConfig) else {}
        for item in fields(config):
            if "group" not in item.metadata or item.name in seen:
                continue
            seen.add(item.name)
            name, value = item.name, getattr(config, item.name)
            if name in given:
                source = sources.get(name, "flag")
                # A config drops --api-key-file after reading it: show the given path.
                value = given[name] if value is None else value
            elif name in chosen:
                value, source = chosen[name], "chosen for this machine"
            else:
                source = "default"
            yield Row(name, "(set)" if name in _SECRETS and value is not None else value, source)


def _chosen(config: EngineConfig) -> dict[str, Any]:
    """Return the values chosen for this machine, without the KV cache's size (it needs weights)."""
    from ..kernels.platform.detect import detect
    from ..runtime.config.resolve import resolve_steps
    from ..runtime.files.resolve import resolve_model_path
    from ..runtime.loader.loader import read_model_config

    model = read_model_config(resolve_model_path(config.model_path), config.model_code)
    steps = resolve_steps(config, model, detect(config.device))
    return {
        item.name: getattr(steps, item.name)
        for item in fields(config)
        if item.name != "max_total_tokens"
        and getattr(steps, item.name) != getattr(config, item.name)
    }


def _yaml(value: Any) -> str:
    """Return the text after a key's colon, so that `--config` reads the same value."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f" {str(value).lower()}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() != "null":
        return f" {text}"
    return f" {json.dumps(text, ensure_ascii=False)}"
