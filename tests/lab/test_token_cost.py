"""`python -m piecework.lab.token_cost`: what a token costs beside its arithmetic."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny_models import make_tiny_model

from piecework.bench.target import Target
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.lab import token_cost


@pytest.mark.skipif(
    not build.runnable_variants()[0].needs, reason="decodes run op by op on this CPU"
)
@pytest.mark.parametrize("asked", [[], ["--temperature", "0.7", "--top-p", "0.9"]])
def test_the_engine_part_tells_both_times_for_each_number_of_requests(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(token_cost, "_PROMPT", 5)
    monkeypatch.setattr(token_cost, "_ANSWER", 9)
    model = str(make_tiny_model(tmp_path, dtype="bfloat16"))
    flags = ["--model-path", model, "--parts", "engine", "--rounds", "1", "--num-threads", "1"]
    assert token_cost.main([*flags, "--clients", "1", "3", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    form = r"(\d) at a time: a step ([\d.]+) ms, ([\d.]+) ms to the next one"
    told = [re.fullmatch(form, line) for line in lines]
    assert [each and each[1] for each in told] == ["1", "3"]
    assert all(float(number) > 0 for each in told if each for number in each.groups()[1:])


def test_without_native_steps_the_other_part_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def served(*arguments: object) -> dict[str, float]:
        return {"web": 0.5}

    async def first_token(label: str, target: Target, process: object) -> Target:
        return target

    monkeypatch.setattr(CpuPlatform, "step_kernels", lambda *arguments: None)
    monkeypatch.setattr(token_cost, "running_server", lambda *_: nullcontext((Mock(pid=1), 1)))
    monkeypatch.setattr(token_cost, "first_token", first_token)
    monkeypatch.setattr(token_cost, "served", served)
    model = str(make_tiny_model(tmp_path))
    assert token_cost.main(["--model-path", model, "--clients", "1", "--rounds", "1"]) == 0
    told = capsys.readouterr()
    assert "no native steps" in told.err
    assert told.out == "1 at a time: 0.500 ms a token (web 0.500)\n"


def test_an_engine_without_native_steps_is_refused_where_nothing_else_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuPlatform, "step_kernels", lambda *arguments: None)
    model = str(make_tiny_model(tmp_path))
    with pytest.raises(SystemExit) as ended:
        token_cost.main(["--model-path", model, "--parts", "engine"])
    assert ended.value.code == 2 and "no native steps" in capsys.readouterr().err
