"""docs/serving.md tells of everything that there is, and of nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from http_fixtures import make_app
from scripted_engine import ScriptedEngine

from piecework.runtime.config import EngineConfig
from piecework.server.args import ServerConfig

MANUAL = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def section(title: str) -> str:
    return MANUAL.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_flags() -> None:
    flags = {f"--{item.name.replace('_', '-')}" for config in (EngineConfig, ServerConfig) for item in fields(config) if item.metadata}
    named = {flag for row in re.findall(r"^\| (`--.*?) \|", section("Flags"), re.M) for flag in re.findall(r"--[a-z-]+", row)}
    assert named == flags


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
