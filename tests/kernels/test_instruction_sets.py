"""What CPUs can do, as Linux and macOS tell it, and the variant of the kernels that follows."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from piecework.kernels.cpu import platform as cpu_platform
from piecework.kernels.cpu.native import build, instruction_sets, openmp

NEOVERSE_N1 = "fp asimd evtstrm aes pmull crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp"


@pytest.mark.parametrize(
    ("cpuinfo", "best"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 fma f16c\n", "avx2"),
        ("processor\t: 0\nflags\t\t: fpu sse2\n", "portable"),
        (f"processor\t: 0\nFeatures\t: {NEOVERSE_N1} svei8mm i8mm bf16\n", "neon_bf16"),
        (f"processor\t: 0\nFeatures\t: {NEOVERSE_N1}\n", "neon_dotprod"),
        ("processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\n", "neon"),
    ],
)
def test_linux_lists_what_the_best_variant_needs(
    cpuinfo: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(instruction_sets, "_CPUINFO", tmp_path / "cpuinfo")
    assert build.runnable_variants()[0].name == best
    assert cpu_platform._has_vectors() == (best != "portable")


@pytest.mark.parametrize(
    ("machine", "known", "best"),
    [
        ("arm64", {"FEAT_FP16", "FEAT_DotProd", "FEAT_BF16", "FEAT_I8MM"}, "neon_bf16"),
        ("arm64", {"FEAT_FP16", "FEAT_DotProd"}, "neon_dotprod"),
        ("x86_64", set(), "portable"),
    ],
)
def test_macos_tells_it_by_name(
    machine: str, known: set[str], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(instruction_sets, "_sysctl", lambda name: name.rpartition(".")[2] in known)
    assert build.runnable_variants()[0].name == best


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clang that has no OpenMP of its own, as Apple's."""
    refuses = "echo \"error: unsupported option '-fopenmp'\" >&2; exit 1"
    monkeypatch.setattr(openmp, "_TORCH", tmp_path / "torch")
    return compiler_that(
        tmp_path / "clang++",
        "*' -dM '*) echo '#define __clang__ 1';; *'-Xclang -fopenmp'*) ;;"
        f"*' -fopenmp '*) {refuses};;",
    )


def compiler_that(path: Path, cases: str) -> Path:
    """A stand-in whose arguments are met by these cases of a shell's `case`."""
    path.write_text(f'#!/bin/sh\ncase " $* " in {cases} esac\nexit 0\n')
    path.chmod(0o755)
    return path


def test_a_clang_without_openmp_takes_what_torch_brings(compiler: Path, tmp_path: Path) -> None:
    library = tmp_path / "torch" / "lib" / "libomp.dylib"
    library.parent.mkdir(parents=True)
    library.touch()
    found = openmp.find_openmp(str(compiler))
    assert found.compile[:2] == ("-Xclang", "-fopenmp") and str(library) in found.link


def test_without_any_openmp_one_line_says_so(
    compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = openmp.find_openmp(str(compiler))
    assert found == openmp.OpenMP()
    (line,) = [record.message for record in caplog.records]
    assert "one thread" in line and "libomp" in line


@pytest.mark.parametrize(
    ("macro", "linked"), [("__clang__", ("-fopenmp",)), ("__GNUC__", ("/torch/libgomp.so.1",))]
)
def test_only_what_is_no_clang_is_linked_to_the_openmp_that_torch_brought(
    macro: str, linked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its macros: Intel's is clang too, and does not say so of itself."""
    monkeypatch.setattr(openmp, "_loaded_library", lambda: "/torch/libgomp.so.1")
    compiler = compiler_that(tmp_path / "icpx", f"*' -dM '*) echo '#define {macro} 1';;")
    assert openmp.find_openmp(str(compiler)) == openmp.OpenMP(("-fopenmp",), linked)


_PROGRAM = """
import ctypes, subprocess, sys
import torch
from piecework.kernels.cpu.native import openmp
compiler, source, made = sys.argv[1:]
found = openmp.find_openmp(compiler)
flags = [*found.compile, "-fPIC", "-shared", source, *found.link, "-o", made]
subprocess.run([compiler, *flags], check=True)
print(ctypes.CDLL(made).seen())
"""
_SEEN = """
#include <omp.h>
extern "C" int seen() {
  int all = 0;
#pragma omp parallel num_threads(2)
#pragma omp atomic
  all += 10 * omp_get_num_threads() + omp_get_thread_num();
  return all;
}
"""


def test_threads_of_a_clang_are_told_apart_beside_torchs(tmp_path: Path) -> None:
    clang = shutil.which("clang++")
    if clang is None or not openmp._works(clang, openmp.OpenMP(("-fopenmp",))):
        pytest.skip("this machine lacks clang++ with OpenMP")
    (tmp_path / "seen.cpp").write_text(_SEEN)
    command = [sys.executable, "-c", _PROGRAM, clang]
    command += [str(tmp_path / name) for name in ("seen.cpp", "seen.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "41", done.stderr
