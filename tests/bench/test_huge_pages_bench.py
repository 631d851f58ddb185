"""`python -m piecework.bench.huge_pages`: both kinds of memory are measured."""

from __future__ import annotations

import pytest

from piecework.bench.huge_pages import main


def test_both_kinds_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", "2", "--rounds", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == ["huge pages", "own pages"]
    assert all(float(line.split()[-1]) > 0 for line in told)
