"""Native kernels where their folder is full, cannot be written or cannot be run from: one true
line, at once, and another way.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from small_disks import mounted

from piecework.kernels.cache_folder import UnusableFolder, ensure_room, locked
from piecework.kernels.cpu.native import build, parts
from piecework.kernels.cpu.native import compiler as compiling
from piecework.kernels.cpu.platform import CpuPlatform

Load = Callable[[Path], tuple[object, list[str]]]
SOURCE = 'extern "C" int answer() { return 42; }'
PORTABLE = build.VARIANTS[-1]
_IS_ASKED = '[ "$1" = --version ] || [ "$1" = -dM ]'
"""What a compiler is, which it says at once."""


@pytest.fixture
def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Load]:
    """Loads small kernels that are kept in a folder: the library, and the lines of the log."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(parts, "SOURCES", sources)
    monkeypatch.setattr(
        build,
        "runnable_variants",
        lambda: [PORTABLE, PORTABLE._replace(name="next", needs=frozenset({"fma"}))],
    )
    monkeypatch.setattr(build, "instruction_sets", lambda: frozenset({"fma"}))
    tries: list[str] = []
    open_variant = build._open
    monkeypatch.setattr(
        build,
        "_open",
        lambda variant, *given: tries.append(variant.name) or open_variant(variant, *given),
    )

    def run(folder: Path) -> tuple[object, list[str]]:
        monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(folder))
        build.load_kernels.cache_clear()
        with caplog.at_level(logging.WARNING):
            library = build.load_kernels()
        assert "next" not in tries
        return library, [record.message for record in caplog.records]

    yield run
    build.load_kernels.cache_clear()


def temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def test_on_a_full_disk_the_kernels_are_built_in_a_temporary_folder_and_nothing_stays(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    temporary_folder(tmp_path / "temporary", monkeypatch)
    with mounted(tmp_path / "full", "size=64k") as full:
        library, lines = load(full / "kernels")
        assert list(full.rglob("*.so")) == []
    assert library is not None and library.answer() == 42  # type: ignore[attr-defined]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert lines == [
        f"the CPU kernels are built again at each start: {full}/kernels: "
        f"{os.strerror(errno.ENOSPC)}; set PIECEWORK_KERNELS_DIR to "
        "another folder for them, or PIECEWORK_CACHE_DIR to one for the whole cache"
    ]


def test_where_no_disk_has_room_plain_torch_runs_and_no_compiler_is_blamed(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "full", "size=64k") as full:
        temporary_folder(full, monkeypatch)
        library, (line,) = load(full / "kernels")
    assert library is None
    assert (
        "plain torch runs" in line
        and line.count("No space left on device") == 2
        and "PIECEWORK_KERNELS_DIR" in line
    )
    assert "g++" not in line


def test_where_no_kernels_are_to_be_had_the_attention_is_called_plain_torch(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecework.kernels.cpu.platform._has_vectors", lambda: True)
    assert (
        load(tmp_path / "kernels")[0] is not None and CpuPlatform().choose_attention() == "native"
    )
    (tmp_path / "file").touch()
    temporary_folder(tmp_path / "missing", monkeypatch)
    assert (
        load(tmp_path / "file" / "kernels")[0] is None
        and CpuPlatform().choose_attention() == "torch"
    )


def test_a_read_only_folder_is_named_with_its_remedy(tmp_path: Path, load: Load) -> None:
    with mounted(tmp_path / "frozen", "size=1m,ro") as frozen:
        library, (line,) = load(frozen / "kernels")
    assert (
        library is not None
        and f"{frozen}/kernels: Read-only file system; set PIECEWORK_KERNELS_DIR" in line
    )


def test_a_folder_that_nothing_may_be_run_from_is_left_for_another(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    noexec, load_library = tmp_path / "noexec", ctypes.CDLL

    def load_elsewhere(path: str) -> ctypes.CDLL:
        if Path(path).parent == noexec:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load_library(path)

    monkeypatch.setattr(ctypes, "CDLL", load_elsewhere)
    library, (line,) = load(noexec)
    assert library is not None and f"what was built there cannot be loaded: {noexec}" in line


def test_kernels_in_a_read_only_folder_are_used_as_they_are(tmp_path: Path, load: Load) -> None:
    with mounted(tmp_path / "image", "size=16m") as image:
        assert load(image)[1] == []
        subprocess.run(["mount", "-o", "remount,ro", image], check=True)
        library, lines = load(image)
    assert library is not None and lines == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_another_user_put_there_is_not_run(
    tmp_path: Path, load: Load, is_folder: bool
) -> None:
    folder = tmp_path / "kernels"
    load(folder)
    (library,) = folder.glob("*.so")
    source = tmp_path / "other.cpp"
    source.write_text(SOURCE.replace("42", "666"))
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    os.chown(folder if is_folder else library, 12345, -1)
    found, (line,) = load(folder)
    assert found is not None and found.answer() == 42  # type: ignore[attr-defined]
    assert "belongs to another user (number 12345)" in line and "PIECEWORK_KERNELS_DIR" in line


def test_a_folder_that_every_user_can_write_is_left_for_another(tmp_path: Path, load: Load) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    found, (line,) = load(folder)
    assert found is not None and f"chmod o-w {folder}" in line


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fills_up_during_the_build_is_known_by_what_the_compiler_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "as: cannot write: {os.strerror(reason)}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UnusableFolder, match=os.strerror(reason)):
        build.load_variant(PORTABLE, tmp_path / "kernels")


@pytest.mark.parametrize("size", [0, 4, 1000, 8000])
def test_a_library_that_was_cut_short_is_built_anew(tmp_path: Path, load: Load, size: int) -> None:
    load(tmp_path / "kernels")
    (library,) = (tmp_path / "kernels").glob("*.so")
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:size])
    found, lines = load(tmp_path / "kernels")
    assert found is not None and found.answer() == 42 and lines == []  # type: ignore[attr-defined]


def test_a_library_of_another_byte_order_is_judged_by_the_loader_alone(tmp_path: Path) -> None:
    library = tmp_path / "other.so"
    library.write_bytes(b"\x7fELF\2\2" + b"\xff" * 500)
    with pytest.raises(OSError) as raised:
        build._load(library)
    assert "cut short" not in str(raised.value)


def test_a_compiler_that_never_ends_costs_its_time_once(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{_IS_ASKED} || exec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compiling, "_BUILD_SECONDS", 0.2)
    library, (line,) = load(tmp_path / "kernels")
    assert library is None and "timed out after 0.2 seconds" in line


def test_a_compiler_that_computes_for_ever_is_ended_with_all_that_it_started(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, computing = tmp_path / "compiler", "while :; do :; done"
    compiler.write_text(
        f"#!/bin/sh\n{_IS_ASKED} || {{ sh -c '{computing}' & "
        f'echo $! > "{tmp_path}/pid"; wait; exit 1; }}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compiling, "_COMPILE_SECONDS", 1)
    library, (line,) = load(tmp_path / "kernels")
    assert library is None and "timed out after 1 seconds" in line
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_room_is_what_can_be_written_and_leaves_nothing(tmp_path: Path) -> None:
    ensure_room(tmp_path / "new" / "folder", 1000)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UnusableFolder, match="file"):
        ensure_room(tmp_path / "file", 1)


def test_a_file_system_without_locks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("piecework.kernels.cache_folder.fcntl.flock", no_locks)
    with locked(tmp_path / "lock"):
        pass
