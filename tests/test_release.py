"""What a release runs: each step of the workflow is a script of this repository, and a wheel serves
where there is no compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from native_variants import needs_kernels
from source_facts import ROOT

from piecework.kernels.cpu.native.variants import runnable_variants
from piecework.version import __version__

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
RUNS = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("command", RUNS)
def test_a_step_is_a_script_that_is_here(command: str) -> None:
    program, script, *_ = command.split()
    assert (ROOT / script).is_file()
    if program == "bash":
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    else:
        compile((ROOT / script).read_text(), script, "exec")


def test_both_architectures_are_built_and_tested() -> None:
    assert WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["runner"] == [
        "ubuntu-22.04",
        "ubuntu-22.04-arm",
    ]
    assert RUNS[:2] == ["bash .ci/run", "bash .ci/wheel"]


@pytest.mark.parametrize("is_right", [True, False])
def test_only_a_tag_of_this_version_is_published(tmp_path: Path, is_right: bool) -> None:
    gh, told = tmp_path / "gh", tmp_path / "told"
    gh.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    gh.chmod(0o755)
    tag = f"v{__version__}" if is_right else "v999.0.0"
    done = subprocess.run(
        ["bash", str(ROOT / ".ci/publish"), tag],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == told.exists() == is_right
    assert is_right or f"tag v{__version__}" in done.stderr


def test_an_installation_takes_uv_if_it_is_there(tmp_path: Path) -> None:
    def commands(path: str) -> str:
        return subprocess.run(
            ["make", "-n", "install", "VENV=/no/such/venv"],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    assert "uv pip install" in commands(f"{tmp_path}:{os.environ['PATH']}")
    without = [
        each for each in os.environ["PATH"].split(":") if each and not (Path(each) / "uv").exists()
    ]
    assert "-m pip" in commands(":".join(without))


@pytest.mark.slow
@needs_kernels
def test_a_wheel_serves_without_a_compiler_by_its_kernels(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "shipped")
    shutil.copytree(ROOT, tree, ignore=left_out)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "piecework").symlink_to(tree)
    ship = [sys.executable, "-m", "piecework.kernels.cpu.native.ship"]
    subprocess.run(
        [*ship, "--variants", runnable_variants()[0].name],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "here")},
        cwd=tmp_path,
        check=True,
    )
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*wheel, "--wheel-dir", tmp_path], cwd=tree, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    check = [sys.executable, str(ROOT / ".ci/check_wheel.py"), str(made)]
    subprocess.run([*check, "--most-seconds", "120"], check=True)
