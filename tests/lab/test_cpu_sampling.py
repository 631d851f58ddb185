"""`python -m piecework.lab.cpu_sampling`: a table of what kernels of sampling give."""

from __future__ import annotations

import pytest
from native_variants import needs_kernels

from piecework.kernels import plain_sampling, reference
from piecework.kernels.cpu.native import sampling
from piecework.lab import cpu_sampling


@needs_kernels
def test_each_way_has_a_positive_figure_of_torch_and_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_sampling, "ROWS", (2,))
    monkeypatch.setattr(cpu_sampling, "VOCABULARIES", (300,))
    assert cpu_sampling.main(["--rounds", "2"]) == 0
    _, _, line = capsys.readouterr().out.splitlines()
    name, *cells = line.strip("| ").split(" | ")
    assert name == "2 x 300" and len(cells) == len(cpu_sampling.WAYS)
    assert all(float(figure) > 0 for cell in cells for figure in cell.split(" / "))


@needs_kernels
@pytest.mark.parametrize("way", range(len(cpu_sampling.WAYS)), ids=cpu_sampling.WAYS)
def test_both_do_the_same(way: int) -> None:
    chosen = []
    for plain, filters in ((plain_sampling, reference), (sampling, sampling)):
        cpu_sampling.torch.manual_seed(3)
        chosen.append(cpu_sampling.ways(3, 500, plain, filters)[way]().tolist())
    assert chosen[0] == chosen[1]


def test_bad_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cpu_sampling.main(["--rounds", "0"])
    assert ended.value.code == 2 and "--rounds takes" in capsys.readouterr().err
