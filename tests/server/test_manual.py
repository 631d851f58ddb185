"""docs/serving.md and docs/diffusion.md tell of everything that there is, and of nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from http_fixtures import make_app
from scripted_engine import ScriptedEngine

from piecework.runtime.config import EngineConfig
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.server.args import ServerConfig
from piecework.server.output_config import OutputConfig

DOCS = Path(__file__).parents[2] / "docs"
MANUAL, DIFFUSION = (DOCS / "serving.md").read_text(), (DOCS / "diffusion.md").read_text()


def section(title: str, manual: str = MANUAL) -> str:
    return manual.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def flags_of(*configs: type) -> set[str]:
    return {f"--{item.name.replace('_', '-')}" for config in configs for item in fields(config) if item.metadata}


def flags_named(manual: str) -> set[str]:
    rows = re.findall(r"^\| (`--.*?) \|", section("Flags", manual), re.M)
    return {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row)}


def test_flags() -> None:
    assert flags_named(MANUAL) == flags_of(EngineConfig, ServerConfig)


def test_flags_of_generate() -> None:
    assert flags_named(DIFFUSION) - {"--no-save-output"} == flags_of(OutputConfig, DiffusionConfig)


def test_endpoints(scripted: ScriptedEngine) -> None:
    """Paths without `/v1` that only repeat one with it are told in words."""
    paths = {re.sub(r"\{.*\}", "{id}", path) for path in make_app(scripted).openapi()["paths"]}
    assert set(re.findall(r"`(?:GET|POST) (/[^`]*)`", section("Endpoints"))) == paths


def test_metrics(scripted: ScriptedEngine) -> None:
    exposed = make_app(scripted).state.serving.metrics.exposition().decode()
    families = re.findall(r"^# TYPE piecework:(\w+) ", exposed, re.M)
    metrics = {name.removesuffix("_total") for name in families if not name.endswith("_created")}
    named = {name for row in re.findall(r"^\| (`\w.*?) \|", section("Metrics"), re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == metrics
