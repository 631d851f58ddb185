"""The parts of the kernels: each file belongs to one, a model compiles those that it calls, and a
part that cannot be compiled costs only its own speed.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from native_variants import needs_kernels

from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cpu.native import build, parts
from piecework.kernels.cpu.native.attention import has_cache
from piecework.kernels.cpu.native.gguf_formats import gguf_formats
from piecework.kernels.cpu.native.linear import NativeLinear

_CORE = """
static const void* added = nullptr;
extern "C" void piecework_add_format(const void* kernels) { added = kernels; }
extern "C" int answer() { return added ? *static_cast<const int*>(added) : 0; }
"""
_FORMAT = """
#define NAME_OF(format) piecework_format_##format
#define NAMED(format) NAME_OF(format)
extern "C" const void* NAMED(PIECEWORK_FORMAT)() { static const int number = 42; return &number; }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources: a core that answers with the number of the format that was added."""
    folder = tmp_path / "sources"
    (folder / "gguf").mkdir(parents=True)
    for name in ("formats", "block", "q9_z"):
        (folder / "gguf" / f"{name}.h").touch()
    (folder / "core.cpp").write_text(_CORE)
    (folder / "format.cpp").write_text(_FORMAT)
    monkeypatch.setattr(parts, "SOURCES", folder)
    return folder


def test_each_file_belongs_to_one_part_or_to_the_core_and_some_parts() -> None:
    sources = {part: parts.sources_of(part) for part in parts.all_parts()}
    assert {each.path for own in sources.values() for each in own} == set(
        parts.SOURCES.glob("*.cpp")
    )
    counts = Counter(source for own in sources.values() for source in own)
    in_several = {source for source, count in counts.items() if count > 1}
    assert {each.name for each in in_several} == {"attention_tiles", "shared"}
    assert in_several < set(sources[parts.CORE])


@pytest.mark.slow
@needs_kernels
def test_kinds_of_caches_are_parts() -> None:
    """A model without such a cache compiles none of them."""
    kernels = build.load_kernels()
    assert kernels is not None
    assert {*CACHE_DTYPES, "float32"} == set(parts.CACHES)
    for name in parts.CACHES:
        assert hasattr(kernels.part(name), f"piecework_cache_{name}")
        assert not hasattr(kernels, f"piecework_cache_{name}")


@needs_kernels
def test_a_cache_that_cannot_be_compiled_is_left_to_torch_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = build.load_kernels()
    assert kernels is not None

    def fail(*names: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(kernels, "need", fail)
    with caplog.at_level(logging.WARNING):
        assert has_cache(kernels, torch.bfloat16)
        assert not has_cache(kernels, torch.int8)
    (line,) = caplog.messages
    assert "lack int8 caches" in line and "the disk is full" in line


@needs_kernels
def test_the_parts_of_formats_are_those_that_the_kernels_list() -> None:
    kernels = build.load_kernels()
    assert kernels is not None and parts.formats() == sorted(gguf_formats(kernels))


def test_a_format_is_compiled_when_it_is_needed_and_kept(small: Path, tmp_path: Path) -> None:
    def loaded() -> build.Kernels:
        return build.load_variant(build.VARIANTS[-1], tmp_path / "kernels")

    def kept() -> list[str]:
        return sorted(path.name.split("-")[1] for path in (tmp_path / "kernels").glob("*.so"))

    kernels = loaded()
    assert kernels.answer() == 0 and kept() == ["core"]
    kernels.need("Q9_Z")
    assert kernels.answer() == 42 and kept() == ["Q9_Z", "core"]
    (small / "format.cpp").touch()
    again = loaded()
    again.need("Q9_Z")
    assert again.answer() == 42 and len(kept()) == 2


def test_missing_kernels_are_compiled_together_with_the_formats_of_a_file(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path / "kernels"))
    best = build.VARIANTS[-1]._replace(name="best", needs=frozenset({"fma"}))
    monkeypatch.setattr(build, "runnable_variants", lambda: [best])
    monkeypatch.setattr(build, "instruction_sets", lambda: best.needs)
    monkeypatch.setattr(build, "_prepared", [])
    build.load_kernels.cache_clear()
    try:
        build.prepare_kernels(lambda: ["F32", "Q9_Z"])
        kernels = build.load_kernels()
        assert kernels is not None and kernels.answer() == 42
        assert capfd.readouterr().err.count("2 files") == 2  # one build: its begin and its end
        with monkeypatch.context() as patch:
            patch.setattr(build, "_are_missing", lambda: pytest.fail("looked on the disk"))
            build.prepare_kernels(lambda: pytest.fail("they are loaded"))
        build.load_kernels.cache_clear()
        build.prepare_kernels(lambda: pytest.fail("nothing is missing"))
    finally:
        build.load_kernels.cache_clear()


@needs_kernels
def test_a_format_that_cannot_be_compiled_is_unpacked_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = build.load_kernels()
    assert kernels is not None

    def fail(*names: str) -> None:
        raise OSError("the disk is full")

    linear = NativeLinear(kernels)
    assert linear.layout("Q4_K", 256) is not None
    monkeypatch.setattr(kernels, "need", fail)
    with caplog.at_level(logging.WARNING):
        assert linear.layout("Q4_K", 256) is None
        assert linear.layout("bfloat16", 256) is not None
    (line,) = caplog.messages
    assert "lack Q4_K" in line and "the disk is full" in line


def test_a_library_is_no_part_of_another(small: Path, tmp_path: Path) -> None:
    """Variants in one process do not share their parts."""
    one = build.load_variant(build.VARIANTS[-1], tmp_path / "one")
    one.need("Q9_Z")
    assert isinstance(one.part("Q9_Z"), ctypes.CDLL)
    other = build.load_variant(build.VARIANTS[-1], tmp_path / "two")
    assert (one.answer(), other.answer()) == (42, 0)
