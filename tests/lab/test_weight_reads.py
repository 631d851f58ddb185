"""`python -m piecework.lab.weight_reads`: each format and kind of memory is measured, and another
build of the kernels beside this one.
"""

from __future__ import annotations

import ctypes.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from piecework.kernels.cpu.native.build import load_kernels
from piecework.lab import weight_reads

_SHORT = ["--weights", "1", "--rounds", "1", "--tokens", "1,8"]


@pytest.fixture
def own() -> str:
    """The file of this machine's kernels."""
    if (library := load_kernels()) is None:
        pytest.skip("this machine has no native kernels")
    return library._name


def _cells(out: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in out.splitlines()[4:]]


@pytest.mark.usefixtures("own")
def test_each_format_is_read_from_huge_pages_and_from_the_machines_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert weight_reads.main([*_SHORT, "--formats", "Q4_K,bfloat16", "--own-pages"]) == 0
    rows = _cells(capsys.readouterr().out)
    found = [(kind, pages) for kind, pages, *_ in rows]
    assert found == [(kind, pages) for kind in ("Q4_K", "bfloat16") for pages in ("huge", "own")]
    assert all(len(rates) == 2 and min(map(float, rates)) > 0 for _, _, *rates in rows)


def test_a_build_that_takes_twice_as_long_makes_these_twice_as_fast(
    own: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, builds = weight_reads._seconds, set()

    def seconds(build: ctypes.CDLL, *arguments: Any) -> float:
        assert real(build, *arguments) > 0
        builds.add(build._name)
        return 1e-3 if build is load_kernels() else 2e-3

    monkeypatch.setattr(weight_reads, "_seconds", seconds)
    # The process's own kernels stay as they are: other tests go on with them.
    monkeypatch.setattr(weight_reads, "_add_formats", lambda *_: pytest.fail("formats replaced"))
    assert weight_reads.main([*_SHORT, "--formats", "Q8_0", "--beside", own]) == 0
    ((_, _, one, eight),) = _cells(capsys.readouterr().out)
    assert one == eight == "8.9, 17.9 (2.00)"  # 17.9 MB, in two milliseconds and in one
    assert builds == {own}


def test_formats_of_another_variant_are_not_those_of_a_build(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if they are newer."""
    kernels = load_kernels()
    assert kernels is not None
    core, part = Path(own), Path(kernels.part("Q8_0")._name)
    for file in (core, part):
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "other-Q8_0-0.so").write_text("not for this core")
    beside = str(tmp_path / core.name)
    assert weight_reads.main([*_SHORT, "--formats", "Q8_0", "--beside", beside]) == 0
    ((_, _, *rates),) = _cells(capsys.readouterr().out)
    assert len(rates) == 2


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--formats", "Q4_K,Q9_Z"),
        ("--formats", "int8"),
        ("--formats", "F32"),
        ("--tokens", "1,x"),
        ("--tokens", "0"),
        ("--rounds", "0"),
        ("--weights", "-1"),
        ("--beside", "missing.so"),
        ("--beside", __file__),
        ("--beside", ctypes.util.find_library("c") or "libc"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line_and_code_2(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        weight_reads.main([flag, value])
    assert raised.value.code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]


def test_a_machine_without_kernels_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reads, "load_kernels", lambda: None)
    with pytest.raises(SystemExit) as raised:
        weight_reads.main([])
    assert raised.value.code == 2
    assert "no native kernels" in capsys.readouterr().err
