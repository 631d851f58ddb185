"""docs/serving.md and docs/diffusion.md tell of everything that there is, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path

import pytest
from fastapi import FastAPI
from http_fixtures import make_app
from scripted_engine import ScriptedEngine

from piecework.cli.core.flags import ServerConfig
from piecework.cli.main import build_parser
from piecework.cli.output_config import OutputConfig
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.foreign_names import SAME
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.speech.config import SpeechConfig
from piecework.server.audio.client import SpeechClient
from piecework.server.config.fleet import FleetLimits
from piecework.server.config.images import ImageServerConfig
from piecework.server.config.pooling import PoolingServerConfig
from piecework.server.config.speech import SpeechServerConfig
from piecework.server.image_service import create_image_app
from piecework.server.images.client import ImageClient
from piecework.server.images.requests import ImagesRequest
from piecework.server.pooling.client import PoolingClient
from piecework.server.pooling_service import create_pooling_app
from piecework.server.speech_service import create_speech_app

DOCS = Path(__file__).parents[2] / "docs"
EMBEDDINGS = (DOCS / "embeddings.md").read_text()
TRANSCRIPTION = (DOCS / "transcription.md").read_text()
MANUAL, DIFFUSION = (DOCS / "serving.md").read_text(), (DOCS / "diffusion.md").read_text()


def section(title: str, manual: str = MANUAL) -> str:
    return manual.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def flags_of(*configs: type) -> set[str]:
    return {
        f"--{item.name.replace('_', '-')}"
        for config in configs
        for item in fields(config)
        if item.metadata
    }


def flags_named(manual: str, title: str = "Flags") -> set[str]:
    rows = re.findall(r"^\| (`--.*?) \|", section(title, manual), re.M)
    return {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row)}


def test_flags() -> None:
    assert flags_named(MANUAL) == flags_of(EngineConfig, ServerConfig, FleetLimits)


def test_foreign_names_and_what_is_taken_without_effect() -> None:
    told = section("Coming from vLLM, SGLang or llama.cpp")
    rows = dict(re.findall(r"^\| `(--[a-z-]+)[^|]*\| `(--[a-z-]+)", told, re.M))
    same = {
        f"--{name.replace('_', '-')}": f"--{own.replace('_', '-')}" for name, own in SAME.items()
    }
    assert same.items() <= rows.items()
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr, index, call-overload]
    known = {name for action in serve._actions for name in action.option_strings}
    assert {flag for flag in rows if flag not in known and not serve.instead_of(flag)} == set()


def test_flags_of_generate() -> None:
    assert flags_named(DIFFUSION) - {"--no-save-output"} == flags_of(OutputConfig, DiffusionConfig)


def test_flags_of_a_server_of_images() -> None:
    assert flags_named(DIFFUSION, "Flags of the server") == flags_of(ImageServerConfig)


def test_flags_of_a_server_of_vectors() -> None:
    assert flags_named(EMBEDDINGS) - {"--is-embedding", "--task"} == flags_of(
        PoolingConfig, PoolingServerConfig
    )


async def test_endpoints_and_metrics_of_a_server_of_vectors() -> None:
    config = PoolingConfig(model_path="models/toy")
    engine = PoolingClient(config, None)  # type: ignore[arg-type]
    app = create_pooling_app(engine, PoolingServerConfig(engine=config), None)  # type: ignore[arg-type]
    assert_endpoints(app, EMBEDDINGS)
    assert_metrics(app, EMBEDDINGS)
    await engine.stop()


async def test_flags_endpoints_and_metrics_of_a_server_of_speech() -> None:
    assert flags_named(TRANSCRIPTION) == flags_of(SpeechConfig, SpeechServerConfig)
    config = SpeechConfig(model_path="models/toy")
    engine = SpeechClient(config)
    app = create_speech_app(engine, SpeechServerConfig(engine=config))
    assert_endpoints(app, TRANSCRIPTION)
    assert_metrics(app, TRANSCRIPTION)
    await engine.stop()


@pytest.fixture
async def image_app() -> AsyncIterator[FastAPI]:
    engine = ImageClient(DiffusionConfig(model_path="models/toy"))
    yield create_image_app(
        engine, ImageServerConfig(engine=DiffusionConfig(model_path="models/toy"))
    )
    await engine.stop()


def assert_endpoints(app: FastAPI, manual: str) -> None:
    """Paths without `/v1` that only repeat one with it may be named in words."""
    paths = {re.sub(r"\{[^}]*\}", "{id}", path) for path in app.openapi()["paths"]}
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", section("Endpoints", manual)))
    repeats = {path for path in paths if f"/v1{path.removeprefix('/v2')}" in paths}
    assert named <= paths <= named | repeats


def assert_metrics(app: FastAPI, manual: str) -> None:
    exposed = app.state.serving.metrics.exposition().decode()
    families = re.findall(r"^# TYPE piecework:(\w+) ", exposed, re.M)
    metrics = {name.removesuffix("_total") for name in families if not name.endswith("_created")}
    named = {
        name
        for row in re.findall(r"^\| (`\w.*?) \|", section("Metrics", manual), re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == metrics


def test_endpoints_and_metrics(scripted: ScriptedEngine) -> None:
    assert_endpoints(make_app(scripted), MANUAL)
    assert_metrics(make_app(scripted), MANUAL)


async def test_endpoints_and_metrics_of_a_server_of_images(image_app: FastAPI) -> None:
    assert_endpoints(image_app, DIFFUSION)
    assert_metrics(image_app, DIFFUSION)


def test_parameters_of_an_image() -> None:
    named = set(re.findall(r"`(\w+)`", section("Parameters", DIFFUSION)))
    assert set(ImagesRequest.model_fields) <= named
