"""`python -m piecework.bench.token_cost`: what a token costs beside its arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from piecework.bench import token_cost
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.platform import CpuPlatform


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


def test_an_engine_without_native_steps_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuPlatform, "step_kernels", lambda *arguments: None)
    model = str(make_tiny_model(tmp_path))
    with pytest.raises(SystemExit) as ended:
        token_cost.main(["--model-path", model, "--parts", "engine"])
    assert ended.value.code == 2 and "no native steps" in capsys.readouterr().err
