"""Pipelines that no family of ours knows run in diffusers' own call, watched from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from diffusion_pipelines import load, pixels, reference, run

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import CompileOptions
from piecework.runtime.core.image_params import DiffusionParams, InvalidParams
from piecework.runtime.diffusion.clock import Clock, Stage
from piecework.runtime.diffusion.whole_pipeline import WholePipeline

PROMPT = "a photo of a red fox in the snow"


def test_another_pipeline_runs_whole(pixart: Path) -> None:
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "width": 32,
        "height": 32,
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
    }
    expected = reference(pixart, 7, use_resolution_binning=False, **asked)
    model = load(pixart)
    assert isinstance(model.family, WholePipeline) and not model.stepwise
    clock, told = Clock(model.platform), list[int]()
    (state,) = model.generate(
        [DiffusionParams(seed=7, **asked)], clock, lambda done, total: told.append(done)
    )
    assert state.pixels is not None and np.array_equal(state.pixels, expected)
    assert told == [0, 1, 2, 3] and len(clock.steps) == 3
    timed = {stage for stage, duration in clock.stages.items() if duration > 0}
    assert timed == set(Stage)


def test_a_pipeline_that_lacks_an_encoder_on_purpose_runs(sd3: Path) -> None:
    """diffusers' own loading wants that said, though the folder says it."""
    model = load(sd3)
    image = pixels(model, prompt=PROMPT, width=64, height=64, num_inference_steps=2)
    assert image.shape == (1, 64, 64, 3) and image.std() > 0.02


def test_a_video_of_a_pipeline_that_asks_what_its_scheduler_takes(ltx: Path) -> None:
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "width": 64,
        "height": 64,
        "num_frames": 9,
        "num_inference_steps": 2,
    }
    expected = reference(ltx, 7, **asked)
    assert expected.shape == (9, 64, 64, 3)
    assert np.array_equal(pixels(load(ltx), seed=7, **asked), expected)


def test_a_pipeline_that_needs_a_picture_too_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="WanImageToVideoPipeline needs image beside a prompt; this pipeline cannot be run",
    ):
        WholePipeline(object.__new__(WanImageToVideoPipeline))


def test_another_pipeline_says_what_its_encoder_cuts_off(pixart: Path) -> None:
    """Its call reads 300 tokens, its tokenizer would read 512."""
    asked: dict[str, Any] = {"width": 32, "height": 32, "num_inference_steps": 1}
    model = load(pixart)
    (long,), (short,) = (
        run(model, DiffusionParams(prompt=prompt, **asked)) for prompt in ("a fox " * 250, "a fox")
    )
    assert long.warnings == [
        "text_encoder reads the first 300 of the prompt's 501 tokens; the rest was cut off"
    ]
    assert short.warnings == []


def test_another_pipeline_s_sizes_are_known_before_it_runs(pixart: Path) -> None:
    model = load(pixart)
    with pytest.raises(
        InvalidParams, match=r"^width must be a multiple of 2 .*, got 33; choose 32 or 34"
    ):
        model.validate(DiffusionParams(prompt=PROMPT, width=33), Clock(model.platform))


def test_another_pipeline_s_own_refusal_is_in_its_words(
    pixart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise ValueError("no\n  such thing")

    model = load(pixart)
    monkeypatch.setattr(model.pipeline, "check_inputs", refuse)
    with pytest.raises(
        InvalidParams, match=r"^PixArtSigmaPipeline refuses the request: no such thing$"
    ) as raised:
        run(model, DiffusionParams(prompt=PROMPT))
    assert raised.value.param is None


def test_another_pipeline_goes_on_where_the_compiler_fails(
    pixart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(CpuPlatform, "compile_options", lambda self: CompileOptions(backend=fail))
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "seed": 7,
        "width": 32,
        "height": 32,
        "num_inference_steps": 2,
    }
    expected = pixels(load(pixart), **asked)
    model = load(pixart, enable_torch_compile=True, regional_compile=True)
    assert model.compiled is not None and model.compiled.regions == {"BasicTransformerBlock": 2}
    assert np.array_equal(pixels(model, **asked), expected)
    assert model.compiled.regions == {}


def test_another_pipeline_stops_too_and_is_whole_afterwards(pixart: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    model = load(pixart)
    asked = DiffusionParams(prompt=PROMPT, width=32, height=32, num_inference_steps=3)
    with pytest.raises(KeyboardInterrupt):
        model.generate([asked], Clock(model.platform), stop)
    (state,) = run(model, asked)
    assert state.pixels is not None and state.pixels.shape == (1, 32, 32, 3)
    assert "decode" not in vars(model.pipeline.vae) and "encode_prompt" not in vars(model.pipeline)
