"""The compile cache gives whole entries or none."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disks import mounted

from piecework.compilation.cache import CompileCache, entry_key
from piecework.kernels.cache_folder import cache_folder

KEY, OTHER = entry_key({"name": 1}), entry_key({"name": 2})


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


def put(cache: CompileCache, key: str, content: bytes, **about: object) -> Path:
    with cache.work_folder() as folder:
        (folder / "made.bin").write_bytes(content)
        return cache.put(key, folder / "made.bin", about)


def test_what_is_put_is_got(cache: CompileCache) -> None:
    put(cache, KEY, b"content")
    path = cache.get(KEY)
    assert path is not None
    assert path.read_bytes() == b"content"
    assert path.suffix == ".bin"
    assert cache.get(OTHER) is None


def test_a_new_entry_replaces_the_old(cache: CompileCache) -> None:
    put(cache, KEY, b"old")
    put(cache, KEY, b"new")
    path = cache.get(KEY)
    assert path is not None
    assert path.read_bytes() == b"new"
    assert len(cache.entries()) == 1


def test_another_cache_on_the_folder_sees_it(cache: CompileCache) -> None:
    put(cache, KEY, b"content")
    assert CompileCache(cache.folder).get(KEY) is not None


def test_nobody_else_may_write_what_is_going_to_be_run(cache: CompileCache) -> None:
    assert cache.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", [b"", b"conten", b"content!", b"Content"])
def test_damaged_content_is_no_entry(cache: CompileCache, damage: bytes) -> None:
    put(cache, KEY, b"content").write_bytes(damage)
    assert cache.get(KEY) is None
    assert cache.entries() == []


def test_missing_content_is_no_entry(cache: CompileCache) -> None:
    put(cache, KEY, b"content").unlink()
    assert cache.get(KEY) is None


@given(
    text=st.one_of(
        st.text(max_size=20),
        st.sampled_from(["{}", "[]", "null", '{"content": 3}', '{"content": "../../etc/passwd"}']),
    )
)
def test_a_damaged_description_is_no_entry(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    cache = CompileCache(tmp_path_factory.mktemp("cache"))
    (cache.folder / f"{KEY}.json").write_text(text)
    assert cache.get(KEY) is None
    assert cache.entries() == []


def test_a_damaged_entry_can_be_put_again(cache: CompileCache) -> None:
    put(cache, KEY, b"content").write_bytes(b"")
    put(cache, KEY, b"content")
    assert cache.get(KEY) is not None


def test_entries_tell_what_they_are(cache: CompileCache) -> None:
    put(cache, KEY, b"abc", kind="piece")
    put(cache, OTHER, b"abcdef", kind="plan")
    assert {(entry.about["kind"], entry.num_bytes) for entry in cache.entries()} == {
        ("piece", 3),
        ("plan", 6),
    }


def test_clear_leaves_nothing_of_its_own_and_all_else(cache: CompileCache) -> None:
    put(cache, KEY, b"abc")
    put(cache, OTHER, b"damaged").write_bytes(b"x")
    with cache.lock(OTHER):
        pass
    (cache.folder / "work-of-a-killed-process").mkdir()
    (cache.folder / "work-of-a-killed-process" / "half").write_bytes(b"x" * 10)
    (cache.folder / "lengths").mkdir()
    (cache.folder / "notes.json").write_text("{}")
    assert cache.clear() >= 14
    assert {path.name for path in cache.folder.iterdir()} == {"lengths", "notes.json"}


def filled(cache: CompileCache) -> CompileCache:
    put(cache, KEY, b"same", kind="piece")
    put(cache, OTHER, b"same", kind="plan")
    return cache


def test_export_and_import(cache: CompileCache, tmp_path: Path) -> None:
    put(filled(cache), entry_key({}), b"damaged").write_bytes(b"")
    assert len(cache.export(tmp_path / "cache.tar.gz")) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["cache.tar.gz"]
    other = CompileCache(tmp_path / "other")
    assert len(other.import_(tmp_path / "cache.tar.gz")) == 2
    assert {(entry.key, entry.about["kind"]) for entry in other.entries()} == {
        (KEY, "piece"),
        (OTHER, "plan"),
    }


def archive_of(tmp_path: Path, name: str, content: bytes = b"evil", **fields: object) -> Path:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        for field, value in fields.items():
            setattr(member, field, value)
        tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/tmp/outside",
        f"sub/{KEY}.json",
        f"../{KEY}.json",
        f"{KEY}.json/../../outside",
        "work-x",
    ],
)
def test_an_archive_writes_nowhere_else(cache: CompileCache, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="is no whole archive"):
        cache.import_(archive_of(tmp_path, name))
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "evil.tar.gz"}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
)
def test_an_archive_holds_plain_files_alone(
    cache: CompileCache, tmp_path: Path, kind: bytes
) -> None:
    with pytest.raises(ValueError, match="is no whole archive"):
        cache.import_(archive_of(tmp_path, f"{KEY}.json", b"", type=kind, linkname="/etc/passwd"))
    assert list(cache.folder.iterdir()) == []


@given(place=st.integers(0, 2**16), change=st.integers(0, 255))
def test_a_damaged_archive_gives_nothing(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    """A byte is changed, or the end is missing: nothing is taken, or every entry is what it was."""
    tmp_path = tmp_path_factory.mktemp("damaged")
    archive = tmp_path / "cache.tar.gz"
    filled(CompileCache(tmp_path / "first")).export(archive)
    content = bytearray(archive.read_bytes())
    place %= len(content)
    if change:
        content[place] ^= change
    else:
        del content[place:]
    archive.write_bytes(content)
    second = CompileCache(tmp_path / "second")
    try:
        second.import_(archive)
    except ValueError:
        assert list(second.folder.iterdir()) == []
    else:
        assert {entry.key for entry in second.entries()} == {KEY, OTHER}
        assert all(
            (second.folder / entry.content).read_bytes() == b"same" for entry in second.entries()
        )


def test_an_archive_whose_content_is_not_what_it_says_is_refused(
    cache: CompileCache, tmp_path: Path
) -> None:
    path = put(filled(cache), KEY, b"first")
    tampered = tmp_path / "tampered"
    tampered.mkdir()
    for file in cache.folder.iterdir():
        if file.is_file():
            (tampered / file.name).write_bytes(b"other" if file == path else file.read_bytes())
    with tarfile.open(tmp_path / "cache.tar.gz", "w:gz") as tar:
        for file in tampered.iterdir():
            tar.add(file, arcname=file.name)
    with pytest.raises(ValueError, match="missing or damaged"):
        CompileCache(tmp_path / "other").import_(tmp_path / "cache.tar.gz")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00half"])
def test_what_is_no_archive_is_refused(cache: CompileCache, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match="is no whole archive"):
        cache.import_(tmp_path / "x.tar.gz")


def test_the_user_chooses_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PIECEWORK_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / "piecework"
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def _make_once(folder: Path, marks: Path) -> None:
    cache = CompileCache(folder)
    with cache.lock(KEY):
        if cache.get(KEY) is None:
            (marks / str(os.getpid())).touch()
            time.sleep(0.2)
            put(cache, KEY, b"made")


def test_of_many_processes_one_makes_the_entry(cache: CompileCache, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    processes = [
        multiprocessing.get_context("fork").Process(target=_make_once, args=(cache.folder, marks))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert len(list(marks.iterdir())) == 1
    assert cache.get(KEY) is not None


def test_a_process_that_dies_lets_go_of_its_lock(cache: CompileCache) -> None:
    def die_in_the_middle() -> None:
        with cache.lock(KEY):
            os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=die_in_the_middle)
    process.start()
    process.join(30)
    with cache.lock(KEY):
        assert cache.get(KEY) is None


def test_on_a_full_disk_it_says_at_once_which_folder_and_what_to_do(tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "size=64k") as full:
        cache = CompileCache(full / "cache")
        with pytest.raises(
            OSError,
            match=f"{full}/cache: No space left on device; choose another folder with "
            "PIECEWORK_CACHE_DIR",
        ):
            cache.check_writable()
        assert list(cache.folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "frozen", "size=64k,ro") as frozen,
        pytest.raises(
            OSError,
            match=f"{frozen}/cache: Read-only file system; choose another folder with "
            "PIECEWORK_CACHE_DIR",
        ),
    ):
        CompileCache(frozen / "cache")


def test_what_lies_in_a_read_only_folder_is_found(tmp_path: Path) -> None:
    with mounted(tmp_path / "image", "size=1m") as image:
        put(CompileCache(image), KEY, b"content")
        subprocess.run(["mount", "-o", "remount,ro", image], check=True)
        cache = CompileCache(image)
        assert cache.get(KEY) is not None and len(cache.entries()) == 1
