"""`piecework serve` finds out what a folder is for, and refuses flags of other models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecework.cli.main import build_parser
from piecework.cli.serve import serving_config
from piecework.server.config.pooling import PoolingServerConfig
from piecework.server.config.server import ServerConfig


def config_of(*argv: str) -> object:
    return serving_config(build_parser().parse_args(["serve", *argv]))


def folder(path: Path, architecture: str, model_type: str) -> str:
    content = {"architectures": [architecture], "model_type": model_type}
    (path / "config.json").write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("architecture", "model_type", "flags", "expected"),
    [
        ("BertModel", "bert", [], PoolingServerConfig),
        ("Qwen3ForCausalLM", "qwen3", [], ServerConfig),
        ("Qwen3ForCausalLM", "qwen3", ["--runner", "pooling"], PoolingServerConfig),
        ("Qwen3ForCausalLM", "qwen3", ["--is-embedding"], PoolingServerConfig),
        ("Qwen3ForCausalLM", "qwen3", ["--task", "embed"], PoolingServerConfig),
        ("Qwen3Model", "qwen3", ["--task", "generate"], ServerConfig),
    ],
)
def test_the_folder_and_the_runner_say_what_is_served(
    tmp_path: Path, architecture: str, model_type: str, flags: list[str], expected: type
) -> None:
    path = folder(tmp_path, architecture, model_type)
    assert type(config_of("--model-path", path, *flags)) is expected


def test_flags_of_text_are_refused_for_vectors(tmp_path: Path) -> None:
    path = folder(tmp_path, "BertModel", "bert")
    with pytest.raises(
        ValueError, match=r"--max-total-tokens is for generating text.*leave it out"
    ):
        config_of("--model-path", path, "--max-total-tokens", "64")


def test_what_makes_no_vectors_is_said_before_anything_starts(tmp_path: Path) -> None:
    path = folder(tmp_path, "T5ForConditionalGeneration", "t5")
    with pytest.raises(ValueError, match=r"config\.json: the architecture 'T5For.*not supported"):
        config_of("--model-path", path, "--runner", "pooling")
