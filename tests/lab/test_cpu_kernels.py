"""`python -m piecework.lab.cpu_kernels`: tables of what kernels of 8 bits give."""

from __future__ import annotations

import pytest
from native_variants import needs_kernels

from piecework.lab import cpu_attention, cpu_kernels


@needs_kernels
def test_each_part_is_a_table_of_positive_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_kernels, "SHAPES", ((64, 128),))
    monkeypatch.setattr(cpu_kernels, "TOKENS", (1, 3))
    monkeypatch.setattr(cpu_kernels, "_MOST_NUMBERS", 1)
    monkeypatch.setattr(cpu_kernels, "_LAYERS", 1)
    monkeypatch.setattr(cpu_kernels, "_SHARED", (cpu_kernels._Shared(3, 64, 20, 4, 2),))
    monkeypatch.setattr(cpu_kernels, "_PACKED", ("Q4_K",))
    parts = "products,invariant,packing,cache,shared"
    assert cpu_kernels.main(["--parts", parts, "--rounds", "2"]) == 0
    products, invariant, packing, cache, shared = capsys.readouterr().out.strip().split("\n\n")
    _, _, cells = (line.strip("| ").split(" | ") for line in products.splitlines())
    assert cells[0] == "64 x 128" and len(cells) == 5
    assert all(float(cell.partition(" ")[0]) > 0 for cell in cells[1:])
    row = invariant.splitlines()[2].strip("| ").split(" | ")
    assert row[0] == "64 x 128" and all(float(cell) > 0 for cell in row[1:]) and len(row) == 3
    rows = [line.strip("| ").split(" | ") for line in packing.splitlines()[2:]]
    assert [row[0] for row in rows] == ["Q4_K", "bfloat16"]
    assert all(float(row[1]) > 0 for row in rows)
    rows = [line.strip("| ").split(" | ") for line in cache.splitlines()[2:]]
    assert [row[0] for row in rows] == ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]
    assert rows[0][2] == "1.00" and all(float(row[1]) > 0 for row in rows)
    row = shared.splitlines()[2].strip("| ").split(" | ")
    assert row[:4] == ["3", "64", "20", "4 and 2"] and all(float(cell) > 0 for cell in row[4:])


@pytest.mark.parametrize("flags", [["--parts", "product"], ["--rounds", "0"]])
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cpu_kernels.main(flags)
    assert ended.value.code == 2 and "--parts takes some of" in capsys.readouterr().err


@needs_kernels
def test_attention_of_prompts_has_a_rate_and_an_error_in_each_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_attention, "PROMPTS", (cpu_attention.Prompt(40, 9, 4, 2, 32),))
    assert cpu_attention.main(["--rounds", "1"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows and rows[0][2] == "float32"
    for row in rows:
        assert row[:2] == ["40 on 9", "4 and 2 of 32"]
        assert float(row[3]) > 0 and 0 < float(row[4]) < 1.1
