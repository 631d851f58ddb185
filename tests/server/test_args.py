"""Flags are the config dataclasses: the same names, types, defaults and limits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.config import EngineConfig
from piecework.server.args import ArgumentParser, ServerConfig, add_config_arguments, report, server_config

CONFIGS = (EngineConfig, ServerConfig)
OPTIONS = {
    item.name: (item, get_type_hints(config)[item.name]) for config in CONFIGS for item in dataclasses.fields(config) if item.metadata
}
RANGES = {"port": (0, 65535), "max_queued_requests": (0, 10**6)}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="piecework serve")
    add_config_arguments(parser, *CONFIGS)
    return parser


def parse(*argv: str) -> ServerConfig:
    return server_config(make_parser().parse_args(argv))


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Valid values of one option, by its type."""
    item, hint = OPTIONS[name]
    if item.metadata["choices"]:
        return st.sampled_from(item.metadata["choices"])
    if hint in (bool, bool | None):
        return st.just(True)
    sizes = st.lists(st.integers(1, 4096), min_size=1).map(lambda numbers: ",".join(map(str, numbers)))
    if name == "piecewise_cuda_graph_tokens":
        return st.integers(1, 99).map("auto:{}".format) | sizes
    if name == "cuda_graph_bs":
        return sizes
    if hint in (int, int | None):
        return st.integers(*RANGES.get(name, (1, 2**40)))
    if hint in (float, float | None):
        return st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
    return st.text(st.characters(min_codepoint=33, max_codepoint=0x3FF), min_size=1).filter(lambda text: not text.startswith("-"))


def agree(settings: dict[str, Any]) -> bool:
    """Whether no two of them contradict each other."""
    return not (settings.get("piecewise_cuda_graph") and settings.get("cuda_graph_backend_prefill", "piecewise") != "piecewise")


SETTINGS = st.fixed_dictionaries({}, optional={name: values_of(name) for name in OPTIONS}).filter(agree)


@given(SETTINGS)
def test_a_command_line_gives_the_config_it_spells(settings: dict[str, Any]) -> None:
    argv = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] if value is True else [flag, str(value)]
    engine = {name: settings.pop(name) for name in list(settings) if name in {item.name for item in dataclasses.fields(EngineConfig)}}
    assert parse(*argv) == ServerConfig(engine=EngineConfig(**engine), **settings)


def test_help_tells_every_flag_and_every_default() -> None:
    text = " ".join(make_parser().format_help().split())
    for name, (item, hint) in OPTIONS.items():
        assert f" --{name.replace('_', '-')} " in text
        assert "default" in item.metadata["help"] or hint is bool or f"{item.metadata['help']}; default: {item.default}" in text


def test_every_option_stands_under_a_heading() -> None:
    text = make_parser().format_help()
    headings = {line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")}
    assert headings == {"options"} | {item.metadata["group"] for item, _ in OPTIONS.values()}


@pytest.mark.parametrize(
    ("model_path", "name"),
    [("smollm2-135m", "smollm2-135m"), ("/models/Llama-3-8B/", "Llama-3-8B"), ("a/b.Q4_1.gguf", "b.Q4_1"), ("org/model", "model")],
)
def test_the_model_is_served_under_its_path_s_last_name(model_path: str, name: str) -> None:
    assert parse("--model-path", model_path).served_model_name == name


def test_a_given_model_name_wins() -> None:
    assert parse("--model-path", "a/b", "--served-model-name", "c").served_model_name == "c"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--max-queued-requests", "-1"),
        ("--drain-timeout", "-0.5"),
        ("--drain-timeout", "inf"),
        ("--drain-timeout", "nan"),
        ("--api-key", ""),
        ("--page-size", "0"),
        ("--mem-fraction-static", "1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_flag_s_name(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=flag):
        parse(f"{flag}={value}")


@pytest.mark.parametrize("argv", [["--port", "many"], ["--dtype", "int4"], ["--port"], ["--drain-timeout", "soon"]])
def test_a_value_of_the_wrong_kind_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("piecework serve: error: ") and error.count("\n") == 1 and argv[0] in error


@pytest.mark.parametrize(
    ("unknown", "answer"),
    [
        (["--modle-path", "x"], "unknown flag --modle-path; did you mean --model-path?"),
        (["--max-total-token=5"], "unknown flag --max-total-token; did you mean --max-total-tokens?"),
        (["--zzz"], "unknown flag --zzz; `piecework serve --help` lists them"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_an_unknown_flag_names_the_closest(unknown: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    _, rest = parser.parse_known_args(unknown)
    with pytest.raises(SystemExit) as ended:
        parser.reject(rest)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"piecework serve: error: {answer}\n"


def test_a_report_is_one_line_whatever_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("piecework serve", ValueError("two\n  lines")) == 2
    assert capsys.readouterr().err == "piecework serve: error: two lines\n"


def test_time_and_memory_shares_are_numbers() -> None:
    config = parse("--drain-timeout", "1.5", "--mem-fraction-static", "0.25")
    assert math.isclose(config.drain_timeout, 1.5) and config.engine.mem_fraction_static == 0.25
