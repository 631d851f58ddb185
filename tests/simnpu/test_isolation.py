"""The simulated device never enters a pytest process that runs tests of other folders too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER = """
import sys, torch

def test_no_npu_here():
    assert not hasattr(torch, "npu") and "torch_npu" not in sys.modules
    found = torch.accelerator.current_accelerator()
    assert found is None or found.type != "npu"
"""
HERE = """
import os
import torch

def test_has_npu(simnpu):
    assert torch.ones(2, device="npu").sum().item() == 2

def test_fails(simnpu):
    assert torch.ones(2, device="npu").sum().item() == 3

def test_crashes(simnpu):
    os._exit(9)
"""


def run(folder: Path, *paths: Path, **environment: str) -> str:
    """The output of pytest -v over these paths, in a process of its own."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -v --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", *map(str, paths)]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST", "PIECEWORK"))
    } | environment
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


def make_suite(folder: Path) -> tuple[Path, Path]:
    """(a folder whose tests have the `simnpu` fixture, a test file of another folder that runs
    after it).
    """
    here, other = folder / "simnpu", folder / "test_other.py"
    for name in ("simnpu", "npu_contract"):
        (folder / name).mkdir()
        for item in (ROOT / "tests" / name).iterdir():
            if not item.name.startswith(("test_", "__pycache__")):
                (folder / name / item.name).symlink_to(item)
    (here / "conftest.py").unlink()
    (here / "conftest.py").write_text((ROOT / "tests" / "simnpu" / "conftest.py").read_text())
    (here / "test_here.py").write_text(HERE)
    (here / "test_before.py").write_text("def test_plain():\n    pass\n")
    other.write_text(OTHER)
    return here, other


@pytest.mark.slow
def test_reports_come_from_a_child_when_other_tests_run_too(tmp_path: Path) -> None:
    output = run(tmp_path, *make_suite(tmp_path))
    assert "test_here.py::test_has_npu PASSED" in output or "SKIPPED" in output, output
    if "SKIPPED" in output:
        return
    assert "test_here.py::test_fails FAILED" in output and "assert 2.0 == 3" in output
    assert (
        "test_here.py::test_crashes FAILED" in output
        and "ended in this test or before it" in output
    )
    assert (
        "test_before.py::test_plain PASSED" in output
        and "test_other.py::test_no_npu_here PASSED" in output
    )


def test_tests_run_in_place_when_they_are_alone(tmp_path: Path) -> None:
    here, _ = make_suite(tmp_path)
    (here / "test_here.py").write_text(
        "import torch\n\ndef test_first(simnpu):\n    torch.once = True\n\ndef "
        "test_second(simnpu):\n    assert torch.once\n"
    )
    (here / "test_plain.py").write_text(
        "import torch\n\ndef test_same_process():\n    assert torch.once\n"
    )
    output = run(tmp_path, here)
    assert "4 passed" in output or "skipped" in output, output


def test_without_a_compiler_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    here, _ = make_suite(tmp_path)
    (here / "test_here.py").write_text("def test_one(simnpu):\n    raise AssertionError\n")
    output = run(tmp_path, here, Path("-rs"), CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert "1 passed, 1 skipped" in output and "no C++ compiler (no-such-compiler)" in output
