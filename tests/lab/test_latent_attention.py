"""`python -m piecework.lab.latent_attention`: one table."""

from __future__ import annotations

import pytest

from piecework.lab import latent_attention


def test_the_latent_cache_is_the_smaller_one(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--context", "40", "--rounds", "1", "--prompts", "9/9,1/40"]
    assert latent_attention.main(settings) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:4]]
    assert [row[:2] for row in rows] == [["latent", "1,152"], ["expanded", "10,240"]]
    assert all(float(row[2]) > 0 for row in rows)
    served = [line.strip("| ").split(" | ")[2:] for line in lines[-2:]]
    assert [["served" in cell for cell in row] for row in served] == [[False, True], [True, False]]
