"""`python -m piecework.bench.latent_attention`: one table."""

from __future__ import annotations

import pytest

from piecework.bench import latent_attention


def test_the_latent_cache_is_the_smaller_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert latent_attention.main(["--context", "40", "--rounds", "1"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["latent", "1,152"], ["expanded", "10,240"]]
    assert all(float(row[2]) > 0 for row in rows)
