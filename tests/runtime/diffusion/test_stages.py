"""Our stages give the pixels of diffusers' own pipeline call, alone and side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusion_pipelines import FAMILIES, Folder, load, pixels, reference, run

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.core.image_params import DiffusionParams, InvalidParams
from piecework.runtime.diffusion.clock import Clock, Stage
from piecework.runtime.diffusion.model import OutOfMemory
from piecework.runtime.diffusion.state import State

TOLERANCE = 1e-3
PROMPT = "a photo of a red fox in the snow"
SIZE: dict[str, Any] = {"width": 96, "height": 64, "num_inference_steps": 4}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("flux", {"guidance_scale": 3.5}, {}),
    ("flux", {"guidance_scale": 1.5}, {}),
    (
        "qwen-image",
        {"negative_prompt": "blurry", "guidance_scale": 4.0},
        {"true_cfg_scale": 4.0, "guidance_scale": None},
    ),
    ("qwen-image", {"guidance_scale": 1.0}, {"true_cfg_scale": 1.0, "guidance_scale": None}),
    (
        "wan",
        {
            "negative_prompt": "blurry",
            "guidance_scale": 4.0,
            "guidance_scale_2": 2.0,
            "num_frames": 5,
        },
        {},
    ),
    ("wan", {"guidance_scale": 1.0, "num_frames": 1}, {}),
]
"""Family, parameters, and how diffusers calls those that it names otherwise."""


def usual(*families: str) -> list[Any]:
    """All families, of which the usual run has some."""
    return [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in families)) for each in FAMILIES
    ]


@pytest.mark.parametrize(("family", "asked", "renamed"), CASES)
def test_pixels_are_diffusers(
    pipeline_folder: Folder, family: str, asked: dict[str, Any], renamed: dict[str, Any]
) -> None:
    expected = reference(pipeline_folder(family), 7, prompt=PROMPT, **SIZE, **(asked | renamed))
    ours = pixels(load(pipeline_folder(family)), prompt=PROMPT, seed=7, **SIZE, **asked)
    assert ours.shape == expected.shape and ours.dtype == np.float32
    assert np.abs(ours - expected).max() < TOLERANCE
    assert expected.std() > 0.05, "a flat image would prove nothing"


@pytest.mark.parametrize("family", usual("qwen-image"))
def test_seed_and_prompt_matter(pipeline_folder: Folder, family: str) -> None:
    model = load(pipeline_folder(family))
    frames = {"num_frames": 5} if family == "wan" else {}
    first = pixels(model, prompt=PROMPT, seed=1, **SIZE, **frames)
    assert np.array_equal(first, pixels(model, prompt=PROMPT, seed=1, **SIZE, **frames))
    assert np.abs(first - pixels(model, prompt=PROMPT, seed=2, **SIZE, **frames)).max() > 0.02
    assert (
        np.abs(first - pixels(model, prompt="two sailing boats", seed=1, **SIZE, **frames)).max()
        > 0.02
    )


@pytest.mark.parametrize("family", usual("flux", "qwen-image"))
def test_states_may_join_and_leave_between_steps(pipeline_folder: Folder, family: str) -> None:
    """Each at its own step, with its own number of steps, guidance and prompt."""
    model = load(pipeline_folder(family))
    frames = {"num_frames": 5} if family == "wan" else {}
    size = {"width": 64, "height": 64, **frames}
    asked = [
        DiffusionParams(prompt=PROMPT, seed=1, num_inference_steps=5, **size),
        DiffusionParams(
            prompt="a robot", seed=2, num_inference_steps=3, guidance_scale=2.0, **size
        ),
        DiffusionParams(
            prompt="a calm sea at dusk, oil painting",
            seed=3,
            num_inference_steps=4,
            guidance_scale=1.0,
            **size,
        ),
    ]
    alone = [state.pixels for each in asked for state in run(model, each)]
    clock = Clock(model.platform)
    states = [model.validate(each, clock) for each in asked]
    running: list[State] = []
    for begins in (states[:1], states[1:2], states[2:], [], [], []):
        for state in begins:
            model.prepare(state, clock)
        running = [state for state in [*running, *begins] if not state.denoised]
        if running:
            model.denoise(running, clock)
    for state, expected in zip(states, alone, strict=True):
        assert state.denoised
        model.decode(state, clock)
        assert state.pixels is not None and expected is not None
        assert np.abs(state.pixels - expected).max() < TOLERANCE


class CountingPlatform(CpuPlatform):
    """Counts how often the device was waited for."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_every_stage_and_step_is_timed_on_an_idle_device(pipeline_folder: Folder) -> None:
    model = load(pipeline_folder("flux"))
    platform = CountingPlatform()
    clock = Clock(platform)
    model.generate([DiffusionParams(prompt=PROMPT, **SIZE)], clock, lambda done, total: None)
    assert list(clock.stages) == list(Stage) and all(
        duration > 0 for duration in clock.stages.values()
    )
    assert len(clock.steps) == SIZE["num_inference_steps"]
    assert sum(clock.steps) <= clock.stages[Stage.DENOISING]
    others = len(Stage) - 1
    assert platform.waits == 2 * others + 4 * SIZE["num_inference_steps"]


def test_steps_are_told_and_can_be_stopped(pipeline_folder: Folder) -> None:
    model = load(pipeline_folder("flux"))
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    clock = Clock(model.platform)
    with pytest.raises(KeyboardInterrupt):
        model.generate([DiffusionParams(prompt=PROMPT, **SIZE)], clock, stop)
    assert told == [(0, 4), (1, 4), (2, 4)] and len(clock.steps) == 2


def test_outputs_of_one_request_encode_their_prompt_once(pipeline_folder: Folder) -> None:
    model = load(pipeline_folder("flux"))
    first, second = run(
        model, *(DiffusionParams(prompt=PROMPT, seed=seed, group="g", **SIZE) for seed in (1, 2))
    )
    assert first.text is second.text
    assert first.pixels is not None and second.pixels is not None
    assert np.abs(first.pixels - second.pixels).max() > 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_too_long_is_cut_with_a_warning(
    pipeline_folder: Folder, family: str
) -> None:
    model = load(pipeline_folder(family))
    frames = {"num_frames": 1} if family == "wan" else {}
    (short,) = run(
        model, DiffusionParams(prompt=PROMPT, width=64, height=64, num_inference_steps=2, **frames)
    )
    assert short.warnings == []
    (state,) = run(
        model,
        DiffusionParams(
            prompt="mountains " * 3000, width=64, height=64, num_inference_steps=2, **frames
        ),
    )
    assert state.pixels is not None
    assert state.warnings and all("reads the first" in warning for warning in state.warnings)


@pytest.mark.parametrize(
    ("family", "asked", "param", "text"),
    [
        (
            "flux",
            {"width": 100},
            "width",
            "multiple of 16 for this pipeline's VAE, got 100; choose 96 or 112",
        ),
        ("wan", {"height": 8}, "height", "choose 16"),
        ("wan", {"num_frames": 6}, "num_frames", "choose 5 or 9"),
        ("qwen-image", {"num_inference_steps": 1}, "num_inference_steps", "at least 2"),
        ("flux", {"num_frames": 5}, "num_frames", "makes images"),
        ("flux", {"guidance_scale_2": 1.0}, "guidance_scale_2", "two transformers"),
    ],
)
def test_what_a_pipeline_cannot_make_names_the_parameter(
    pipeline_folder: Folder, family: str, asked: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(InvalidParams, match=text) as raised:
        run(
            load(pipeline_folder(family)),
            DiffusionParams(prompt=PROMPT, **({"width": 64, "height": 64} | asked)),
        )
    assert raised.value.param == param and str(raised.value).startswith(param)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": " "}, "prompt"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 100_000}, "num_inference_steps"),
        ({"width": 0}, "width"),
        ({"height": 1 << 30}, "height"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_what_no_pipeline_can_make_names_the_parameter(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParams) as raised:
        DiffusionParams(**{"prompt": PROMPT, **asked})
    assert raised.value.param == param


@pytest.mark.parametrize("family", ["qwen-image", "wan"])
def test_a_negative_prompt_that_is_cut_off_is_told_too(
    family: str, pipeline_folder: Folder
) -> None:
    model = load(pipeline_folder(family))
    asked: dict[str, Any] = {
        "width": 32,
        "height": 32,
        "num_frames": 1,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
    }
    (state,) = run(model, DiffusionParams(prompt=PROMPT, negative_prompt="a fox " * 600, **asked))
    (warning,) = state.warnings
    assert "of the negative prompt's" in warning and "cut off" in warning


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_is_one_line_and_the_model_goes_on(
    pipeline_folder: Folder, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    model = load(pipeline_folder("flux"))
    asked = DiffusionParams(prompt=PROMPT, width=64, height=64, num_inference_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(model.pipeline.transformer, "forward", fail)
        with pytest.raises(OutOfMemory, match="ask for a smaller width, height or num_frames"):
            run(model, asked)
    (state,) = run(model, asked)
    assert state.pixels is not None


def test_another_error_of_the_device_is_not_taken_for_it(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("an illegal memory access")

    model = load(pipeline_folder("flux"))
    monkeypatch.setattr(model.pipeline.transformer, "forward", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(model, DiffusionParams(prompt=PROMPT, width=64, height=64, num_inference_steps=2))
