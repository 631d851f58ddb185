"""Command lines of SGLang's users run as they are written: only the model's folder is another."""

from __future__ import annotations

import shlex
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch
from diffusion_pipelines import Folder

from piecework.cli.core.flags import given
from piecework.cli.main import build_parser, main
from piecework.runtime.diffusion.config import DiffusionConfig

WHOLE = """
generate --model-path {model} --prompt "A curious raccoon" --width 1024 --height 1024
--vae-precision bf16 --num-inference-steps 20 --warmup --enable-torch-compile
"""
REGIONAL = """
generate --model-path {model} --prompt "A curious raccoon" --num-inference-steps 20
--attention-backend sage_attn --pin-cpu-memory --enable-torch-compile --regional-compile --warmup
"""


def test_the_commands_are_understood() -> None:
    whole, regional = (
        DiffusionConfig(**given(build_parser().parse_args(shlex.split(text)), DiffusionConfig))
        for text in (WHOLE, REGIONAL)
    )
    assert whole.vae_precision == "bf16" and whole.warms_up and whole.enable_torch_compile
    assert regional.attention_backend == "sage" and regional.regional_compile


def test_the_help_shows_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--seed N" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("family", "command"), [("flux", WHOLE), ("qwen-image", REGIONAL)])
def test_a_command_makes_its_image(
    family: str,
    command: str,
    pipeline_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    assert main(shlex.split(command.format(model=pipeline_folder(family)))) == 0
    printed = capsys.readouterr()
    assert "compiled " in printed.out and "20 steps" in printed.out
    (image,) = (tmp_path / "outputs").iterdir()
    assert imageio.imread(image).shape[2] == 3
