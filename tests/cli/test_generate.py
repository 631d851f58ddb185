"""`piecework generate`: files, figures, and what a person sees who asks for what cannot be."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as imageio
import pytest
from diffusion_pipelines import Folder
from tiny_models import make_tiny_model

from piecework.cli.main import main
from piecework.kernels.cpu.platform import CpuPlatform

SMALL = [
    "--prompt",
    "a red fox",
    "--width",
    "64",
    "--height",
    "48",
    "--num-inference-steps",
    "3",
    "--num-threads",
    "1",
]


def generate(folder: Path, out: Path | str, *flags: str) -> int:
    return main(
        ["generate", "--model-path", str(folder), "--output-path", str(out), *SMALL, *flags]
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_an_image_is_a_png(
    terminal: bool,
    pipeline_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = pipeline_folder("flux")
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert generate(folder, tmp_path / "new" / "folder", "--seed", "9") == 0
    printed = capsys.readouterr()
    path = tmp_path / "new" / "folder" / "a-red-fox_9.png"
    assert printed.out.startswith(f"{path}\n")
    assert all(
        name in printed.out
        for name in ("text encoding", "denoising", "3 steps", "decoding", "total")
    )
    assert ("3/3" in printed.err) is terminal, (
        "a progress bar over the steps, where somebody can see it move"
    )
    assert ("\r" in printed.err) is terminal
    image = imageio.imread(path)
    assert image.shape == (48, 64, 3) and image.std() > 5


def test_several_outputs_have_seeds_of_their_own(pipeline_folder: Folder, tmp_path: Path) -> None:
    assert (
        generate(pipeline_folder("qwen-image"), tmp_path, "--num-outputs", "2", "--seed", "5") == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a-red-fox_5.png",
        "a-red-fox_6.png",
    ]
    assert generate(pipeline_folder("qwen-image"), tmp_path / "x.png", "--seed", "6") == 0
    second, alone = imageio.imread(tmp_path / "a-red-fox_6.png"), imageio.imread(tmp_path / "x.png")
    assert abs(second.astype(int) - alone).max() <= 1


def test_a_video_is_an_mp4_or_frames(pipeline_folder: Folder, tmp_path: Path) -> None:
    assert generate(pipeline_folder("wan"), tmp_path, "--num-frames", "5") == 0
    video = imageio.imread(tmp_path / "a-red-fox_42.mp4", plugin="FFMPEG")
    assert video.shape == (5, 48, 64, 3)
    assert generate(pipeline_folder("wan"), tmp_path / "f.png", "--num-frames", "5") == 0
    frames = [imageio.imread(tmp_path / f"f-{number:04d}.png") for number in range(5)]
    assert all(frame.shape == (48, 64, 3) for frame in frames)
    # The codec loses a little, and no more.
    assert abs(video[0].astype(int) - frames[0]).mean() < 12


def test_nothing_is_written_without_save_output(pipeline_folder: Folder, tmp_path: Path) -> None:
    assert generate(pipeline_folder("flux"), tmp_path, "--no-save-output") == 0
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_sglang_s_members(pipeline_folder: Folder, tmp_path: Path) -> None:
    report = tmp_path / "deep" / "perf.json"
    assert (
        generate(pipeline_folder("flux"), tmp_path, "--perf-dump-path", str(report), "--warmup")
        == 0
    )
    figures = json.loads(report.read_text())
    names = [step["name"] for step in figures["steps"]]
    assert names == [
        f"{name}Stage"
        for name in (
            "InputValidation",
            "TextEncoding",
            "LatentPreparation",
            "TimestepPreparation",
            "Denoising",
            "Decoding",
        )
    ]
    assert [step["step"] for step in figures["denoise_steps_ms"]] == [0, 1, 2]
    assert all(
        step["duration_ms"] > 0 for step in (*figures["steps"], *figures["denoise_steps_ms"])
    )
    assert figures["total_duration_ms"] >= sum(step["duration_ms"] for step in figures["steps"])
    assert figures["memory_checkpoints"]["after_DenoisingStage"]["peak_reserved_mb"] > 0
    assert figures["meta"]["num_inference_steps"] == 3


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--width", "50"],
            "--width must be a multiple of 16 for this pipeline's VAE, got 50; choose 48 or 64",
        ),
        (
            ["--num-inference-steps", "0"],
            "--num-inference-steps must lie between 1 and 1000, got 0",
        ),
        (
            ["--num-inference-steps", "100000"],
            "--num-inference-steps must lie between 1 and 1000, got 100000",
        ),
        (["--prompt", " "], "--prompt TEXT is required"),
        (["--num-outputs", "0"], "--num-outputs must lie between 1 and 64"),
        (["--num-frames", "3"], "--num-frames must be 1"),
        (["--output-path", "/proc/nowhere"], "--output-path /proc/nowhere cannot be written"),
        (
            ["--perf-dump-path", "/proc/nowhere/x.json"],
            "--perf-dump-path /proc/nowhere/x.json cannot be written",
        ),
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["--output-path", "/tmp/x.mp4"], "is a video, but an image is to be made"),
        (["--output-path", "/tmp/x.jpg"], "files are written as .png or .mp4"),
        (["--prompt", "a \udcff fox"], "--prompt is not valid Unicode at character 2"),
        (
            ["--negative-prompt", "x" * 100_001],
            "--negative-prompt has more than 100,000 characters",
        ),
    ],
)
def test_bad_input_is_one_line(
    pipeline_folder: Folder,
    tmp_path: Path,
    flags: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate(pipeline_folder("flux"), tmp_path, *flags) == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("piecework generate: error: ")
        and text in printed
        and printed.count("\n") == 1
    )


def test_the_peak_of_memory_is_never_below_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts the peak late."""
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1))
    use = CpuPlatform().memory_use()
    assert use.peak_allocated == use.allocated > 2**20


def test_what_a_full_disk_refuses_is_one_line(
    pipeline_folder: Folder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert generate(pipeline_folder("flux"), tmp_path) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("cannot be written: No space left on device")
    )


def test_a_language_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(make_tiny_model(tmp_path / "llama"), tmp_path) == 2
    assert "holds a language model" in capsys.readouterr().err


def test_without_the_extra_it_says_how_to_get_it(pipeline_folder: Folder, tmp_path: Path) -> None:
    flags = [
        "generate",
        "--model-path",
        str(pipeline_folder("flux")),
        "--output-path",
        str(tmp_path),
        "--prompt",
        "x",
    ]
    code = (
        "import sys; sys.modules['diffusers'] = None\nfrom piecework.cli.main import "
        f"main\nsys.exit(main({flags!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'piecework[diffusion]'" in done.stderr
