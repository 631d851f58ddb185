"""`python -m piecework.bench.recurrent`: one table."""

from __future__ import annotations

import pytest

from piecework.bench import recurrent


def test_each_model_is_measured_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 3, "prompt": 5, "decodes": 2, "requests": 2, "rounds": 1, "hidden": 64}
    settings = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    assert recurrent.main(["--models", "lfm2", *settings]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["lfm2", "piecework"], ["lfm2", "transformers"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
