"""What a killed build of the C++ kernels leaves is removed by the next one, and nothing of a build
that goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from piecework.kernels.cpu.native import build, compiler, parts

_BUILD = (
    "import sys\n"
    "from pathlib import Path\n"
    "from piecework.kernels.cpu.native import build, parts\n"
    "parts.SOURCES = Path(sys.argv[1])\n"
    "build.load_variant(build.VARIANTS[-1], Path(sys.argv[2]))\n"
)


class Builder:
    """A process whose compiler waits in the middle of its file until it is told to go on."""

    def __init__(self, folder: Path, sources: Path, kernels: Path) -> None:
        compiler, self._go_on = folder / "compiler", folder / "go-on"
        compiler.write_text(
            '#!/bin/sh\ncase "$*" in *" -c "*answer.cpp*) touch "$TMPDIR/half-written"\n'
            f'while [ ! -e "{self._go_on}" ]; do sleep 0.05; done;; esac\nexec c++ "$@"\n'
        )
        compiler.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BUILD, str(sources), str(kernels)],
            env=os.environ | {"CXX": str(compiler)},
            stderr=subprocess.DEVNULL,
        )
        self._kernels = kernels

    def making(self) -> Path:
        """Its folder, as soon as there is something in it."""
        while True:
            for file in self._kernels.glob("*/half-written"):
                return file.parent
            assert self.process.poll() is None
            time.sleep(0.02)

    def go_on(self) -> None:
        self._go_on.touch()
        self.process.wait()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(parts, "SOURCES", folder)
    return folder


@pytest.fixture
def builder(tmp_path: Path, sources: Path) -> Iterator[Builder]:
    """Its compiler is another than that of the tests, and so are its kernels."""
    started = Builder(tmp_path, sources, tmp_path / "kernels")
    yield started
    started.go_on()


def folders(kernels: Path) -> list[Path]:
    return [path for path in kernels.iterdir() if path.is_dir()]


def test_the_next_build_removes_what_a_killed_one_left(builder: Builder, tmp_path: Path) -> None:
    left = builder.making()
    builder.process.send_signal(signal.SIGKILL)
    builder.process.wait()
    assert folders(tmp_path / "kernels") == [left]
    assert build.load_variant(build.VARIANTS[-1], tmp_path / "kernels").answer() == 42
    assert folders(tmp_path / "kernels") == []


def test_a_build_that_goes_on_keeps_its_folder(builder: Builder, tmp_path: Path) -> None:
    own = builder.making()
    build.load_variant(build.VARIANTS[-1], tmp_path / "kernels")
    assert folders(tmp_path / "kernels") == [own]
    builder.go_on()
    assert builder.process.returncode == 0 and folders(tmp_path / "kernels") == []
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 2


def test_nothing_is_removed_where_locks_are_not_to_be_had(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("piecework.kernels.cache_folder.fcntl.flock", no_locks)
    others = tmp_path / f"other{compiler.MAKING}1"
    others.mkdir()
    build.load_variant(build.VARIANTS[-1], tmp_path)
    assert others.exists()
