"""Kernels that came with the package: taken with the sources that they were made of, without a
compiler; where they cannot be loaded the machine builds its own.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piecework.kernels.cpu.native import build, parts, ship
from piecework.kernels.cpu.native.compiler import MAKING

_THREADS = """
#include <omp.h>
extern "C" int answer() { return 42; }
extern "C" int threads() {
  int found = 0;
#pragma omp parallel
#pragma omp atomic
  ++found;
  return found;
}
"""
VARIANTS = [variant for variant in build.runnable_variants() if variant.needs]
pytestmark = pytest.mark.skipif(
    not VARIANTS
    or sys.platform != "linux"
    or platform.machine() not in ship._ARCHITECTURES
    or shutil.which("g++") is None,
    reason="kernels of this CPU are not shipped, or there is no g++ to make them",
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small kernels in place of the package's; what is built of them lies in `built` beside it."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(_THREADS)
    monkeypatch.setattr(parts, "SOURCES", folder)
    monkeypatch.setattr(ship, "all_parts", lambda: [parts.CORE])
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("CXX", "g++")
    build.load_kernels.cache_clear()
    yield folder
    build.load_kernels.cache_clear()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def loaded() -> ctypes.CDLL:
    library = build.load_kernels()
    assert library is not None and library.answer() == 42
    return library


def test_they_need_no_compiler_and_compute_by_torchs_threads(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ship.main(["--variants", VARIANTS[0].name]) == 0
    without_compiler(monkeypatch)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert loaded().threads() == 3
    finally:
        torch.set_num_threads(before)
    assert not (tmp_path / "built").exists()


def test_of_other_sources_they_are_not_taken(sources: Path, tmp_path: Path) -> None:
    ship.main(["--variants", VARIANTS[0].name])
    (sources / "answer.cpp").write_text(_THREADS + "// mended\n")
    assert str(tmp_path / "built") in loaded()._name


def test_what_cannot_be_loaded_is_one_line_and_built_here(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship.main(["--variants", VARIANTS[0].name])
    library = build.shipped_library(VARIANTS[0])
    library.write_bytes(library.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        assert str(tmp_path / "built") in loaded()._name
    (line,) = caplog.messages
    assert "came with the package" in line


def test_without_a_compiler_either_plain_torch_runs_and_the_remedy_is_said(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "runnable_variants", lambda: VARIANTS[:1])
    ship.main(["--variants", VARIANTS[0].name])
    build.shipped_library(VARIANTS[0]).write_bytes(b"")
    without_compiler(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels() is None
    assert "install g++" in caplog.messages[-1]


def test_without_a_compiler_the_next_best_is_taken_and_said(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best = VARIANTS[0]._replace(name="best")
    monkeypatch.setattr(build, "runnable_variants", lambda: [best, VARIANTS[0]])
    ship.main(["--variants", VARIANTS[0].name])
    without_compiler(monkeypatch)
    with caplog.at_level(logging.WARNING):
        loaded()
    (line,) = caplog.messages
    assert f"are {VARIANTS[0].name} instead of best: this machine has no C++ compiler" in line


def test_what_was_shipped_of_earlier_sources_and_what_a_killed_run_left_goes(sources: Path) -> None:
    ship.main(["--variants", VARIANTS[0].name])
    killed = sources / "shipped" / f"{VARIANTS[0].name}{MAKING}0123"
    killed.mkdir()
    (killed / "kernels.h").write_text("// of a build")
    (sources / "answer.cpp").write_text(_THREADS + "// mended\n")
    ship.main(["--variants", VARIANTS[0].name])
    assert list((sources / "shipped").iterdir()) == [build.shipped_library(VARIANTS[0])]


def test_a_variant_that_the_compiler_cannot_make_is_named_and_the_others_are_there(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = [
        each for each in build.VARIANTS if ship._ARCHITECTURES[platform.machine()] in each.needs
    ][-2:]
    old = tmp_path / "old-compiler"
    old.write_text(f'#!/bin/sh\ncase "$*" in *{one.flags[-1]}*) exit 1;; esac\nexec g++ "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert ship.main(["--variants", f"{one.name},{other.name}"]) == 1
    assert not build.shipped_library(one).exists() and build.shipped_library(other).exists()
    assert f"{one.name} is not shipped" in capsys.readouterr().err


def test_a_package_that_cannot_be_written_is_one_line(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "shipped").write_text("no folder")
    assert ship.main(["--variants", VARIANTS[0].name]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{VARIANTS[0].name} is not shipped" in line and "shipped" in line


@pytest.mark.parametrize(
    ("flags", "compiler", "system", "said"),
    [
        (["--variants", "avx3"], "g++", "linux", "'avx3' is not one of"),
        ([], "missing", "linux", "install g++"),
        ([], "clang", "linux", "is clang"),
        ([], "g++", "darwin", "for Linux on"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_code_2(
    flags: list[str],
    compiler: str,
    system: str,
    said: str,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if compiler == "missing":
        without_compiler(monkeypatch)
    if compiler == "clang":
        named = tmp_path / "clang"
        named.write_text("#!/bin/sh\necho '#define __clang__ 1'\n")
        named.chmod(0o755)
        monkeypatch.setenv("CXX", str(named))
    monkeypatch.setattr(ship.sys, "platform", system)
    with pytest.raises(SystemExit) as ended:
        ship.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
