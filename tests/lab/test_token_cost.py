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
from piecework.lab import stand_in, token_cost
from piecework.runtime.core.generation import FinishReason, GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed.ranks import ALONE


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


@pytest.mark.slow
def test_a_server_without_a_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(stand_in.PACE, "1")  # Restored after the test.
    model = str(make_tiny_model(tmp_path))
    flags = ["--parts", "web", "--clients", "2", "--rounds", "1", "--answer", "5"]
    assert token_cost.main(["--model-path", model, *flags, "--stand-in", "1"]) == 0
    line = capsys.readouterr().out
    told = re.fullmatch(r"2 at a time: ([\d.]+) ms a token \(.+\)\n", line)
    assert told and float(told[1]) > 0


def test_the_stand_in_gives_each_request_a_token_a_step_until_it_has_all() -> None:
    engine = stand_in.build({}, ALONE)
    for rid, tokens in (("a", 1), ("b", 3), ("c", 3)):
        params = SamplingParams(max_new_tokens=tokens)
        engine.handle(GenerateRequest(rid=rid, input_ids=[1], params=params))
    steps = [each for _ in range(2) for each in engine.step()]
    engine.abort(["c", "unknown"])
    while engine.work() is not None:
        steps += engine.step()
    given = [[(each.rid, each.finish_reason) for each in step.outputs] for step in steps]
    assert given == [
        [("a", FinishReason.LENGTH), ("b", None), ("c", None)],
        [("b", None), ("c", None)],
        [("b", FinishReason.LENGTH)],
    ]
