"""What users of Piecework rely on, as a list: commands and flags, endpoints, metrics,
`piecework.LLM`, exit codes.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import piecework
from piecework.cli.main import EXIT_INTERRUPTED, build_parser
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.llm import LLM, Completion
from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.speech.config import SpeechConfig
from piecework.server.app import create_app
from piecework.server.audio.client import SpeechClient
from piecework.server.config.images import ImageServerConfig
from piecework.server.config.pooling import PoolingServerConfig
from piecework.server.config.server import ServerConfig
from piecework.server.config.speech import SpeechServerConfig
from piecework.server.engine.client import EngineClient
from piecework.server.image_service import create_image_app
from piecework.server.images.client import ImageClient
from piecework.server.launch import EXIT_ENGINE_GONE, EXIT_USER_ERROR
from piecework.server.pooling.client import PoolingClient
from piecework.server.pooling_service import create_pooling_app
from piecework.server.speech_service import create_speech_app

LISTED = Path(__file__).with_suffix(".json")
"""Written by `python tests/test_public_surface.py`; what changes in it is for the changelog."""
CONFIGS: tuple[Any, ...] = (
    EngineConfig,
    DiffusionConfig,
    ServerConfig,
    ImageServerConfig,
    PoolingConfig,
    PoolingServerConfig,
    SpeechConfig,
    SpeechServerConfig,
    SamplingParams,
)


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, list[str]]]:
    """Each command with its arguments: names, what they take, and what is chosen among."""
    arguments = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, own in action.choices.items():
                yield from commands(own, f"{name} {command}")
        else:
            choices = "" if action.choices is None else f" of {','.join(map(str, action.choices))}"
            metavar = f" {action.metavar}" if isinstance(action.metavar, str) else ""
            arguments.append("/".join(action.option_strings or [action.dest]) + metavar + choices)
    yield name, sorted(arguments)


def surface() -> dict[str, Any]:
    text, images = ServerConfig(), ImageServerConfig(engine=DiffusionConfig(model_path="pipeline"))
    client = EngineClient(EngineConfig(), None)  # type: ignore[arg-type]
    image_client = ImageClient(
        images.engine, max_queued_requests=1, log_level="info", watchdog_timeout=0, process=None
    )
    pooling = PoolingServerConfig(engine=PoolingConfig(model_path="embedder"))
    pooling_client = PoolingClient(pooling.engine, None)  # type: ignore[arg-type]
    speech = SpeechServerConfig(engine=SpeechConfig(model_path="whisper"))
    apps = {
        "text": create_app(client, text),
        "images": create_image_app(image_client, images),
        "pooling": create_pooling_app(pooling_client, pooling, None),  # type: ignore[arg-type]
        "speech": create_speech_app(SpeechClient(speech.engine), speech),
    }
    members = {
        kind.__name__: sorted(name for name in dir(kind) if not name.startswith("_"))
        for kind in (LLM, Completion, SamplingParams)
    }
    return {
        "commands": dict(commands(build_parser(), "piecework")),
        "defaults": {
            config.__name__: {
                item.name: re.sub(r" at 0x[0-9a-f]+", "", repr(item.default))
                for item in dataclasses.fields(config)
                if item.name != "engine"
            }
            for config in CONFIGS
        },
        "endpoints": {
            kind: {
                path: {
                    method.upper(): sorted(
                        {parameter["name"] for parameter in operation.get("parameters", [])}
                        | set(operation.get("requestBody", {}).get("content", {}))
                        | set(operation["responses"])
                    )
                    for method, operation in methods.items()
                }
                for path, methods in app.openapi()["paths"].items()
            }
            for kind, app in apps.items()
        },
        "bodies": {
            kind: {
                name: sorted(schema["properties"])
                for name, schema in app.openapi()["components"]["schemas"].items()
                if "properties" in schema
            }
            for kind, app in apps.items()
        },
        "metrics": {
            kind: sorted(
                line.split()[2]
                for line in app.state.serving.metrics.exposition().decode().splitlines()
                if line.startswith("# TYPE")
            )
            for kind, app in apps.items()
        },
        "package": [
            name for name in ("LLM", "SamplingParams", "__version__") if hasattr(piecework, name)
        ],
        "members": members,
        "completion": sorted(vars(Completion([]))),
        "signatures": {
            name: str(inspect.signature(getattr(LLM, name)))
            for name in ("__init__", "generate", "chat")
        },
        "finish_reasons": [reason.value for reason in FinishReason],
        "exit_codes": {
            "user error": EXIT_USER_ERROR,
            "engine gone": EXIT_ENGINE_GONE,
            "interrupted": EXIT_INTERRUPTED,
        },
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found() -> dict[str, Any]:
    """All of it: made once."""
    return json.loads(json.dumps(surface()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", json.loads(LISTED.read_text()) if LISTED.exists() else [])
def test_what_users_rely_on_is_as_listed(part: str, found: dict[str, Any]) -> None:
    assert found[part] == json.loads(LISTED.read_text())[part]


if __name__ == "__main__":
    LISTED.write_text(json.dumps(surface(), indent=1) + "\n")
    sys.exit()
