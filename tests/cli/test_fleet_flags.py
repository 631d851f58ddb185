"""Several models on one command line: what is wrong is told before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecework.cli.core.flags import ServerConfig
from piecework.cli.core.settings import parse
from piecework.cli.fleet import fleet_config
from piecework.cli.main import build_parser, main
from piecework.cli.serve import serving_config
from piecework.server.config.fleet import FleetConfig
from piecework.server.config.pooling import PoolingServerConfig


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders `text` and `vectors`, whose weights nobody looks at."""
    monkeypatch.setattr("piecework.cli.fleet.check_model", lambda config: None)
    for name, kind, model_type in (
        ("text", "Qwen3ForCausalLM", "qwen3"),
        ("vectors", "BertModel", "bert"),
    ):
        (tmp_path / name).mkdir()
        content = {"architectures": [kind], "model_type": model_type}
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return tmp_path


def config_of(*argv: str) -> FleetConfig:
    config = fleet_config(parse(build_parser(), ["serve", *argv], {}), serving_config)
    assert config is not None
    return config


def file(models: Path, text: str) -> str:
    path = models / "models.yaml"
    path.write_text(text.format(models=models))
    return str(path)


GOOD = """
port: 7777
num_threads: 1
dtype: float32
max_loaded_models: 2
models:
  - name: a
    model_path: {models}/text
    max_total_tokens: 4k
    pinned: true
  - model_path: {models}/vectors
    idle_unload: 5
"""


def test_a_file_says_what_holds_for_all_and_for_each(models: Path) -> None:
    config = config_of("--config", file(models, GOOD), "--host", "0.0.0.0", "--api-key", "secret")
    assert (config.host, config.port, config.limits.max_loaded_models) == ("0.0.0.0", 7777, 2)
    a, vectors = config.members
    assert isinstance(a.server, ServerConfig) and isinstance(vectors.server, PoolingServerConfig)
    assert (a.name, a.pinned, a.server.engine.max_total_tokens) == ("a", True, 4000)
    assert (vectors.name, vectors.idle_unload) == ("vectors", 5.0)
    for member in config.members:
        engine = member.server.engine
        assert (engine.num_threads, engine.dtype) == (1, "float32")
        assert member.server.api_key is None and member.server.batch_dir == "none"


def test_names_and_paths_may_be_flags(models: Path) -> None:
    paths = (f"a=b={models}/text", f"x={models}/text")
    with pytest.raises(ValueError, match="does not exist"):
        config_of("--model-path", paths[0], "--model-path", paths[1])
    config = config_of("--model-path", paths[1], "--model-path", f"{models}/vectors")
    assert [each.name for each in config.members] == ["x", "vectors"]


def test_one_path_is_a_server_of_one_model(models: Path) -> None:
    arguments = parse(build_parser(), ["serve", "--model-path", f"{models}/text"], {})
    assert fleet_config(arguments, serving_config) is None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("pinned: true", "pined: true", "models.yaml:10: unknown key pined; did you mean pinned?"),
        ("{models}/text", "/nowhere", "models.yaml:7: /nowhere does not exist"),
        ("name: a", "name: vectors", "models.yaml:11: the name vectors is already used at "),
        ("name: a", "name: default", "models.yaml:7: 'default' cannot be a model's name"),
        (
            "pinned: true",
            "port: 5",
            "models.yaml:10: port is not a setting of piecework: it holds for all",
        ),
        ("idle_unload: 5", "idle_unload: -5", "models.yaml:11: --idle-unload must be 0 or more"),
        ("idle_unload: 5", "max_total_tokens: 5", "--max-total-tokens is for generating text"),
        (
            "name: a",
            "name: a\n    served_model_name: b",
            "is already set under another name",
        ),
        ("max_loaded_models: 2", "max_loaded_models: 0", "--max-loaded-models must be at least 1"),
        ("port: 7777", "model_path: /x", "both name models"),
        ("port: 7777", "image_url_memory: 3", "--image-url-memory fits none of these models"),
        ("port: 7777", "runner: pooling", "--runner is for one model"),
        ("port: 7777", "served_model_name: x", "--served-model-name is for one model"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    models: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    try:
        code = main(["serve", "--config", file(models, GOOD.replace(old, new, 1))])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_list_of_no_models_is_no_server_of_one(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--config", file(models, "models: []")])
    assert "models.yaml:1: models must be a list of mappings" in capsys.readouterr().err


def test_a_variable_for_another_command_is_passed_over(models: Path) -> None:
    argv = ["serve", "--config", file(models, GOOD)]
    arguments = parse(build_parser(), argv, {"PIECEWORK_IMAGE_URL_MEMORY": "3"})
    assert fleet_config(arguments, serving_config) is not None


def test_flags_of_several_models_are_refused_for_one(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"{models}/text", "--fleet-memory", "4"]) == 2
    assert "--fleet-memory is for several models" in capsys.readouterr().err


def test_what_config_prints_of_several_models_is_a_file_that_says_the_same(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piecework.cli.config._chosen", lambda config: {})
    path = file(models, GOOD)
    assert main(["config", "--config", path]) == 0
    printed = capsys.readouterr().out
    assert f"  max_total_tokens: 4000  # {path}:9" in printed
    (models / "printed.yaml").write_text(printed)
    assert config_of("--config", str(models / "printed.yaml")) == config_of("--config", path)
