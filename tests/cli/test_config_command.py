"""`piecework config` prints what a server would run with, as a file that says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from piecework.cli.main import main

SECRET = "sk-very-secret"
Shown = Callable[..., dict[str, dict[str, object]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("config") / "model # 1: tiny"))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What `piecework config ARGV --json` says."""

    def run(*argv: str) -> dict[str, dict[str, object]]:
        assert main(["config", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    return run


def test_each_value_has_its_source(
    model: str, tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("host: 0.0.0.0\nport: 7\n")
    monkeypatch.setenv("PIECEWORK_PORT", "8")
    told = shown(model, "--config", str(file), "--log-level", "debug")
    assert told["host"] == {"value": "0.0.0.0", "source": f"{file}:1"}
    assert told["port"] == {"value": 8, "source": "PIECEWORK_PORT"}
    assert told["log_level"] == {"value": "debug", "source": "flag"}
    assert told["drain_timeout"] == {"value": 30.0, "source": "default"}
    assert told["page_size"]["source"] == "chosen for this machine" and told["page_size"]["value"]


def test_what_it_prints_says_the_same_to_a_server(
    model: str, tmp_path: Path, shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [model, "--cuda-graph-bs", "1,2", "--responses-store", "off", "--page-size", "32"]
    assert main(["config", *argv]) == 0
    file = tmp_path / "b.yaml"
    file.write_text(capsys.readouterr().out)
    first, second = shown(*argv), shown("--config", str(file))
    assert {name: one["value"] for name, one in first.items()} == {
        name: one["value"] for name, one in second.items()
    }


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_key_is_not_printed(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    as_json: list[str],
) -> None:
    monkeypatch.setenv("PIECEWORK_API_KEY", SECRET)
    assert main(["config", model, *as_json]) == 0
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err and "PIECEWORK_API_KEY" in printed.out


def test_what_a_server_would_refuse_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--port", "77777"]) == 2
    assert "--port must lie between" in capsys.readouterr().err
