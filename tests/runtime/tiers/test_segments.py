"""Blocks on disk: what was written is read again by any process, and damage is a missing block."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path

import pytest

from piecework.runtime.tiers import segments
from piecework.runtime.tiers.segments import Segments
from piecework.runtime.tiers.store import KEY_BYTES

ROOMY = 1 << 30


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def block(number: int, size: int = 1000) -> bytes:
    return random.Random(number).randbytes(size)


def read(store: Segments, number: int, size: int = 1000) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.get(key(number), memoryview(into)) else None


def fill(store: Segments, numbers: range, size: int = 1000) -> None:
    for number in numbers:
        assert store.put(key(number), memoryview(block(number, size)))


def test_blocks_are_found_again_by_other_processes_and_after_a_restart(tmp_path: Path) -> None:
    first, second = Segments(tmp_path, ROOMY), Segments(tmp_path, ROOMY)
    fill(first, range(20))
    second._look_due = 0.0
    assert all(second.has(key(number)) for number in range(20)) and not second.has(key(20))
    fill(second, range(20, 30))
    first.close()
    third = Segments(tmp_path, ROOMY)
    assert [read(third, number) for number in range(30)] == [block(n) for n in range(30)]
    assert read(third, 3, 999) is None and third.size_of(key(3)) == 1000
    assert third.num_bytes == second.num_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_a_damaged_or_cut_file_loses_blocks_and_never_gives_wrong_ones(tmp_path: Path) -> None:
    fill(Segments(tmp_path / "whole", ROOMY), range(12), 200)
    (whole,) = (tmp_path / "whole").iterdir()
    data, chance = whole.read_bytes(), random.Random(0)
    for trial in range(200):
        folder = tmp_path / str(trial)
        folder.mkdir()
        damaged = bytearray(data)
        if trial % 2:
            del damaged[chance.randrange(len(data)) :]
        else:
            damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (folder / whole.name).write_bytes(damaged)
        store = Segments(folder, ROOMY)
        found = [read(store, number, 200) for number in range(12)]
        assert all(each in (None, block(n, 200)) for n, each in enumerate(found))
        assert None in found
        fill(store, range(12), 200)
        assert [read(store, n, 200) for n in range(12)] == [block(n, 200) for n in range(12)]


def test_the_files_stay_within_their_bytes_and_keep_what_is_used(tmp_path: Path) -> None:
    most = 16 << 20
    store = Segments(tmp_path, most)
    for number in range(60):
        fill(store, range(number, number + 1), 1 << 19)
        for path in tmp_path.iterdir():  # A clock that is coarser than this test.
            status = path.stat()
            os.utime(path, (status.st_mtime - 1, status.st_mtime - 1))
        for segment in store._segments.values():
            segment.touched = 0.0
        assert read(store, 0, 1 << 19) == block(0, 1 << 19), "a block that is used is lost"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= most + (1 << 20)
    assert read(store, 10, 1 << 19) is None and read(store, 59, 1 << 19) is not None
    assert store.prune(4 << 20) > 0 and store.num_bytes <= 4 << 20


def test_a_full_disk_is_one_warning_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Segments(tmp_path, ROOMY)
    fill(store, range(3))
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: whole(file, [parts[0][:9]]))
    assert [store.put(key(n), memoryview(block(n))) for n in range(3, 6)] == [False] * 3
    monkeypatch.undo()
    assert not store.put(key(6), memoryview(block(6))), "it does not try again at once"
    store._write_due = 0.0
    fill(store, range(6, 9))
    assert len(caplog.records) == 1 and "disk is full" in caplog.text
    found = [read(Segments(tmp_path, ROOMY), number) is not None for number in range(9)]
    assert found == [True] * 3 + [False] * 3 + [True] * 3


def test_a_folder_that_cannot_be_written_still_gives_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(Segments(tmp_path, ROOMY), range(3))
    store, opened = Segments(tmp_path, ROOMY), os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert not store.put(key(9), memoryview(block(9)))
    assert read(store, 1) == block(1) and "Read-only file system" in caplog.text


def test_files_of_others_and_links_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Segments(tmp_path / "theirs", ROOMY), range(3))
    (path,) = (tmp_path / "theirs").iterdir()
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / path.name).symlink_to(path)
    (ours / "other.txt").write_bytes(path.read_bytes())
    assert Segments(ours, ROOMY).num_blocks == 0
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert Segments(tmp_path / "theirs", ROOMY).num_blocks == 0


def test_a_folder_that_changes_the_owner_of_files_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such files are not read again, so they would neither be found nor deleted."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    store = Segments(tmp_path, ROOMY)
    assert not store.put(key(0), memoryview(block(0))) and not list(tmp_path.iterdir())
    assert "another owner" in caplog.text


def test_an_error_that_a_network_folder_tells_at_the_end_of_a_file_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = os.close

    def tell(file: int) -> None:
        close(file)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", tell)
    store = Segments(tmp_path, ROOMY)
    fill(store, range(3))
    store.close()
    assert "Disk quota exceeded" in caplog.text


def test_a_segment_that_another_process_deleted_is_a_miss_and_a_new_one_begins(
    tmp_path: Path,
) -> None:
    store = Segments(tmp_path, ROOMY)
    fill(store, range(3))
    for path in tmp_path.iterdir():
        path.unlink()
    store._look_due = 0.0
    assert not store.has(key(9)) and not store.has(key(1)) and read(store, 1) is None
    fill(store, range(3))
    assert read(Segments(tmp_path, ROOMY), 1) == block(1)


def test_many_restarts_leave_a_bounded_number_of_files_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MOST_FILES", 5)
    for number in range(12):
        store = Segments(tmp_path, ROOMY)
        fill(store, range(number, number + 1))
        store.close()
    assert len(list(tmp_path.iterdir())) <= 6
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in tmp_path.iterdir())
