"""The measurement of engines of several ranks."""

from __future__ import annotations

import pytest
from tiny_models import make_tiny_model

from piecework.lab import ranks


@pytest.mark.slow
def test_two_ranks_and_one_process_are_measured(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_model(tmp_path, "llama")
    engines = ["--engine", "one:dtype=float32", "--engine", "tp2:dtype=float32;tp_size=2"]
    given = ["--model-path", str(path), *engines, "--loads", "single", "--rounds", "1"]
    assert ranks.main(given) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "| tokens/s | one | tp2 |  |" and row.startswith("| single | ")


def test_a_setting_that_there_is_none_of_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ranks.main(["--engine", "one:tp=2"])
    assert "there is no setting 'tp'" in capsys.readouterr().err
