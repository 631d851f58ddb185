"""`piecework generate` by several processes: the same pixels, and one line where one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import psutil
import pytest
from diffusion_pipelines import Folder

from piecework.cli.main import main
from piecework.lab.diffusion_tiny import Size, make_pipeline_folder

SMALL = ["--prompt", "a red fox", "--width", "64", "--height", "64", "--num-frames", "1"]


def command(folder: Path, out: Path, *flags: str, steps: int = 3) -> list[str]:
    more = ["--output-path", str(out), "--num-inference-steps", str(steps), *flags]
    return [sys.executable, "-m", "piecework", "generate", str(folder), *SMALL, *more]


def generate(folder: Path, out: Path, *flags: str) -> np.ndarray:
    done = subprocess.run(command(folder, out, *flags), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "ranks share" not in line]
    assert not said, "the other ranks say nothing"
    return imageio.imread(out).astype(int)


def check_same_pixels(folder: Path, tmp_path: Path, ranks: int) -> None:
    together = generate(folder, tmp_path / "ranks.png", "--ulysses-degree", str(ranks))
    assert main([*command(folder, tmp_path / "alone.png")[3:], "--num-threads", "1"]) == 0
    alone = imageio.imread(tmp_path / "alone.png").astype(int)
    assert np.abs(together - alone).max() <= 1 and alone.std() > 5


@pytest.mark.slow
def test_two_processes_write_the_picture_of_one(pipeline_folder: Folder, tmp_path: Path) -> None:
    check_same_pixels(pipeline_folder("flux"), tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "qwen-image", "wan"])
def test_four_processes_write_the_picture_of_one(family: str, tmp_path: Path) -> None:
    folder = make_pipeline_folder(tmp_path / family, family, Size(heads=4))
    check_same_pixels(folder, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_command_with_one_line(
    pipeline_folder: Folder, tmp_path: Path, number: signal.Signals
) -> None:
    flags = ["--num-gpus", "2", "--num-outputs", "8", "--dist-timeout", "5"]
    process = subprocess.Popen(
        command(pipeline_folder("flux"), tmp_path, *flags, steps=1000),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        other = lost = None
        while other is None or other.cpu_times().user < 6:
            time.sleep(0.2)
            other = next(iter(psutil.Process(process.pid).children()), None)
        lost = other.pid
        os.kill(lost, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert said.startswith("piecework generate: error: ") and said.count("\n") == 1, said
    assert "rank" in said
    deadline = time.monotonic() + 10
    while psutil.pid_exists(lost) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(lost), "no rank outlives the command"
