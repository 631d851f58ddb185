"""How the C++ kernels are compiled: the common header is parsed once, where that can be, and not
before a test runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from piecework.kernels.cpu.native import build, parts
from piecework.kernels.cpu.native import compiler as compiling

Build = Callable[[str, str], list[str]]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds two files by a compiler of this name, in front of which `check` runs: its commands."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "weights.h").write_text("#pragma once\ninline int number() { return 42; }\n")
    (sources / "step.cpp").write_text('extern "C" int zero() { return 0; }')
    (sources / "rest.cpp").write_text(
        '#include "weights.h"\nextern "C" int answer() { return number(); }'
    )
    monkeypatch.setattr(parts, "SOURCES", sources)

    def run(name: str, check: str) -> list[str]:
        compiler, told = tmp_path / name, tmp_path / "commands"
        compiler.write_text(f'#!/bin/sh\necho "$@" >> {told}\n{check}\nexec c++ "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        library = build.load_variant(build.VARIANTS[-1], tmp_path / "kernels")
        assert library.answer() == 42
        return told.read_text().splitlines()

    return run


def test_files_begin_with_a_header_that_was_compiled_but_for_the_one_that_takes_longest(
    commands: Build,
) -> None:
    said = commands("compiler", "")
    (header,) = (line for line in said if "-x c++-header" in line)
    (rest,) = (line for line in said if "rest.cpp" in line)
    (longest,) = (line for line in said if "step.cpp" in line)
    assert f"-include {header.rpartition(' ')[2].removesuffix('.gch')} " in rest
    assert "-include" not in longest


def test_a_header_that_no_compiler_takes_hinders_nothing(commands: Build) -> None:
    said = commands("compiler", 'case "$*" in *c++-header*) exit 1;; esac')
    assert not any("-include" in line for line in said)


@pytest.mark.parametrize(("name", "room"), [("ccache", 1), ("compiler", 2**60)])
def test_no_header_is_compiled_for_a_cache_of_objects_nor_on_a_disk_with_little_room(
    commands: Build, monkeypatch: pytest.MonkeyPatch, name: str, room: int
) -> None:
    monkeypatch.setattr(compiling, "_HEADER_BYTES", room)
    assert not any("c++-header" in line or "-include" in line for line in commands(name, ""))


@pytest.mark.slow
def test_tests_are_collected_without_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path))
    tests = str(Path(__file__).parents[1])
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*collect, tests], check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []
