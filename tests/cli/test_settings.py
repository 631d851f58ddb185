"""Flags by a file and by variables: the values of a command line, which goes before both."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.cli import serve
from piecework.cli.core.flags import ArgumentParser, add_config_arguments
from piecework.cli.core.settings import parse, settable, variable_of
from piecework.cli.main import build_parser, main
from piecework.runtime.config.engine import EngineConfig

SECRET = "sk-very-secret"
TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))


def read(
    tmp_path: Path, text: str, *argv: str, command: str = "serve", **environment: str
) -> argparse.Namespace:
    """What `piecework COMMAND --config FILE ARGV` is told, with a file of this text."""
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return parse(build_parser(), [*command.split(), *argv, "--config", str(path)], environment)


def error_of(capsys: pytest.CaptureFixture[str], call: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and SECRET not in error
    return str(error)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("port: 8000", "port", 8000),
        ("port: '8000'", "port", 8000),
        ("--port: 8000", "port", 8000),
        ("max-running-requests: 4k", "max_running_requests", 4000),
        ("max_model_len: auto", "context_length", None),
        ("model: a/b", "model_path", "a/b"),
        ("cuda-graph-bs: [1, 2]", "cuda_graph_bs", "1,2"),
        ("cors_origins:\n- https://a.example\n- https://b.example", "cors_origins",
         "https://a.example,https://b.example"),
        ("responses_store: off", "responses_store", "off"),
        ("responses_store: none", "responses_store", "none"),
        ("dist_init_addr: 10.0.0.1:29500", "dist_init_addr", "10.0.0.1:29500"),
        ("disable_radix_cache: true", "disable_radix_cache", True),
        ("enable_prefix_caching: false", "disable_radix_cache", True),
        ("drain_timeout: 1.5", "drain_timeout", 1.5),
    ],
)  # fmt: skip
def test_a_key_is_read_as_its_flag_is(tmp_path: Path, text: str, name: str, value: Any) -> None:
    assert getattr(read(tmp_path, text), name) == value


def test_a_flag_goes_before_a_variable_and_that_before_the_file(tmp_path: Path) -> None:
    text = "port: 1\nhost: file\nlog_level: debug\n"
    told = read(tmp_path, text, "--port", "3", PIECEWORK_PORT="2", PIECEWORK_HOST="variable")
    assert (told.port, told.host, told.log_level) == (3, "variable", "debug")
    assert told.sources == {
        "host": "PIECEWORK_HOST",
        "log_level": f"{tmp_path / 'settings.yaml'}:3",
    }


@pytest.mark.parametrize("argv", [["m"], ["--model-path", "m"], ["--model", "m"]])
def test_a_model_of_the_command_line_is_the_only_one(tmp_path: Path, argv: list[str]) -> None:
    assert read(tmp_path, "model_path: other", *argv).model_path == "m"


def test_a_key_by_a_flag_puts_the_file_s_aside(tmp_path: Path) -> None:
    told = read(tmp_path, "api_key_file: keys", "--api-key", "flag", PIECEWORK_API_KEY="variable")
    assert told.api_key == "flag" and "api_key_file" not in told
    told = read(tmp_path, "api_key_file: keys", PIECEWORK_API_KEY="variable")
    assert told.api_key == "variable" and "api_key_file" not in told


def test_flags_with_defaults_of_their_own_are_read_too(tmp_path: Path) -> None:
    text = "num-prompts: 7\nignore_eos: yes\nbase_url: http://a"
    told = read(tmp_path, text, "--num-prompts", "9", command="bench serving", PIECEWORK_SEED="5")
    assert (told.num_prompts, told.ignore_eos, told.base_url, told.seed) == (9, True, "http://a", 5)
    assert told.temperature == 0
    assert read(tmp_path, text, command="bench serving").num_prompts == 7


def test_every_option_of_a_config_has_a_key() -> None:
    keys = settable(build_parser()._subparsers._group_actions[0].choices["serve"])  # type: ignore
    for config in (*serve._TEXT, *serve._IMAGES, *serve._POOLING):
        assert {item.name for item in dataclasses.fields(config) if item.metadata} <= keys.keys()
    assert variable_of("max_running_requests") == "PIECEWORK_MAX_RUNNING_REQUESTS"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("host: a\nprot: 1", ":2: unknown key prot; did you mean port?"),
        ("zzz: 1", ":1: unknown key zzz; `piecework serve --help` lists them"),
        ("swap_space: 4", "nothing is swapped to host memory"),
        ("help: true", "unknown key help"),
        ("config: other.yaml", "unknown key config"),
        ("\nport: many", ":2: port: 'many' is not a whole number"),
        ("port: [1, 2]", ":1: port takes one value, not a list"),
        ("port: {a: 1}", ":1: port takes a value or a list"),
        ("cuda_graph_bs: [[1], [2]]", ":1: expected keys and values"),
        ("dtype: int4", ":1: dtype: 'int4' is not one of auto, bfloat16"),
        ("disable_radix_cache: maybe", ":1: disable_radix_cache: 'maybe' must be true or false"),
        ("port: 1\nport: 2", "settings.yaml:2: port is given twice; "),
        (
            "port: 1\nmodel: a\nmodel_path: b",
            ":3: model_path is already set under another name at ",
        ),
        ("- port", ":1: expected keys and values"),
        ("? [a]\n: 1", ":1: a key must be the name of a flag"),
        ("port: [1", "expected ',' or ']'"),
        ("a: 1\n---\nb: 1", "but found another document"),
        ("port: &a 1", "anchors and aliases are not supported"),
        ("a: " + "[" * 200_000, "lists and mappings are nested more than"),
        ('port: "\\uD800"', ":1: port contains half of a surrogate pair"),
        ("a: \x01", "has characters that YAML does not allow"),
        (f"api_key: [{SECRET}]", "api_key takes one value"),
        (f"api_key: {SECRET}\nport: x", ":2: port"),
        (f"api_key: {SECRET}: x", ":1: mapping values are not allowed here"),
        ("#" * (2**20 + 1), "is larger than 1 MiB"),
        ("models:\n- modell: a", ":2: unknown key modell; did you mean model?"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    assert told in error_of(capsys, lambda: read(tmp_path, text))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PIECEWORK_PORT": "x"}, "PIECEWORK_PORT: 'x' is not a whole number"),
        ({"PIECEWORK_DISABLE_RADIX_CACHE": "2"}, "'2' must be true or false"),
        (
            {"PIECEWORK_MODEL": "a", "PIECEWORK_MODEL_PATH": "b"},
            "are the same setting; set only one",
        ),
        ({"PIECEWORK_API_KEY": ""}, "PIECEWORK_API_KEY is empty"),
    ],
)
def test_what_is_wrong_in_a_variable_is_told_by_its_name(
    capsys: pytest.CaptureFixture[str], environment: dict[str, str], told: str
) -> None:
    assert told in error_of(capsys, lambda: parse(build_parser(), ["serve"], environment))


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("PIECEWORK_MAX_RUNING_REQUESTS", "did you mean PIECEWORK_MAX_RUNNING_REQUESTS?"),
        ("PIECEWORK_CACHE_DIRS", "did you mean PIECEWORK_CACHE_DIR?"),
        ("PIECEWORK_NUM_PROMPTS", ""),
        ("PIECEWORK_CACHE_DIR", ""),
        ("PIECEWORK_TEAM_OF_THE_CLUSTER", ""),
    ],
)
def test_a_variable_that_is_nearly_one_is_warned_of(
    capsys: pytest.CaptureFixture[str], name: str, warned: str
) -> None:
    parse(build_parser(), ["serve"], {name: SECRET})
    error = capsys.readouterr().err
    assert warned in error and bool(warned) == bool(error) and SECRET not in error


def test_a_refused_value_is_told_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("page_size: 0")
    assert main(["serve", "--config", str(path)]) == 2
    assert f"(--page-size is from {path}:1)" in capsys.readouterr().err


def test_variables_for_other_kinds_of_models_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    argv = ["serve", str(tmp_path)]
    told = parse(build_parser(), argv, {"PIECEWORK_PAGE_SIZE": "8", "PIECEWORK_PORT": "7"})
    assert serve.serving_config(told).port == 7
    with pytest.raises(ValueError, match="--page-size is for language models"):
        serve.serving_config(parse(build_parser(), [*argv, "--page-size", "8"], {}))


def test_entries_of_models_have_flags_and_lines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = ArgumentParser(prog="piecework serve")
    add_config_arguments(each, EngineConfig)
    top = ArgumentParser(prog="piecework serve")
    top.add_config_file_argument()
    top.set_defaults(parser=top)
    top.models = each
    path = tmp_path / "models.yaml"

    def models(text: str) -> Any:
        path.write_text(text)
        return parse(top, ["--config", str(path)], {}).models

    first, second = models("models:\n- model: a\n- model: b\n  page_size: 16\n")
    assert first.settings["model_path"].value == "a" and first.where == f"{path}:2"
    assert second.settings["page_size"].value == 16
    assert second.settings["page_size"].source == f"{path}:4"
    assert ":3: unknown key pag_size" in error_of(
        capsys, lambda: models("models:\n- model: a\n  pag_size: 1")
    )
    assert "must be a list of mappings" in error_of(capsys, lambda: models("models: a"))


@settings(max_examples=10)
@given(st.dictionaries(st.sampled_from(["host", "served_model_name"]), TEXT))
def test_any_text_comes_through_a_quoted_value(
    tmp_path_factory: pytest.TempPathFactory, values: Mapping[str, str]
) -> None:
    """JSON is YAML: what it escapes is read back."""
    told = read(tmp_path_factory.mktemp("s"), json.dumps(values))
    assert {name: getattr(told, name) for name in values} == values
