"""`python -m piecework.bench.weight_reads`: each format and kind of memory is measured, and another
build of the kernels beside this one.
"""

from __future__ import annotations

import pytest

from piecework.bench.weight_reads import main
from piecework.kernels.cpu.native.build import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no native kernels here")
_SHORT = ["--weights", "1", "--rounds", "1", "--tokens", "1,8"]


def _cells(out: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in out.splitlines()[4:]]


def test_each_format_is_read_from_huge_pages_and_from_the_machines_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*_SHORT, "--formats", "Q4_K,bfloat16", "--own-pages"]) == 0
    rows = _cells(capsys.readouterr().out)
    found = [(kind, pages) for kind, pages, *_ in rows]
    assert found == [(kind, pages) for kind in ("Q4_K", "bfloat16") for pages in ("huge", "own")]
    assert all(len(rates) == 2 and float(min(rates)) > 0 for _, _, *rates in rows)


def test_another_build_takes_turns(capsys: pytest.CaptureFixture[str]) -> None:
    library = load_kernels()
    assert library is not None
    assert main([*_SHORT, "--formats", "Q8_0", "--beside", library._name]) == 0
    ((_, _, one, _),) = _cells(capsys.readouterr().out)
    other, these, ratio = one.replace(",", "").replace("(", "").replace(")", "").split()
    assert 0.2 < float(these) / float(other) / float(ratio) < 5
