"""The extension is built once for each torch version and source text, and tests are skipped where
it cannot be.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from simnpu_device import build


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_key_changes_with_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    before = build.library_path()
    assert before == build.library_path()
    with open(sources / "memory.h", "a") as file:
        file.write("// more\n")
    assert build.library_path() != before


def test_the_key_changes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path()
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert build.library_path() != before


def test_no_compiler_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (build.missing_tools() or "")


def test_no_ninja_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "ninja" in (build.missing_tools() or "")


def test_a_built_extension_needs_no_tools(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library_path().parent.mkdir(parents=True)
    build.library_path().touch()
    assert build.missing_tools() is None
