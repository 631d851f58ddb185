"""Compiled pipelines give diffusers' pixels, and the flags reach every transformer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_pipelines import FAMILIES, Folder, load, pixels

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import CompileOptions
from piecework.runtime.core.image_params import DiffusionParams

ASKED: dict[str, Any] = {
    "prompt": "a photo of a red fox",
    "seed": 3,
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
}
BLOCKS = {
    "flux": {"FluxTransformerBlock": 2, "FluxSingleTransformerBlock": 2},
    "qwen-image": {"QwenImageTransformerBlock": 2},
    "wan": {"WanTransformerBlock": 4},
}
WHOLE = {
    "flux": {"FluxTransformer2DModel": 1},
    "qwen-image": {"QwenImageTransformer2DModel": 1},
    "wan": {"WanTransformer3DModel": 2},
}


USUAL = (("qwen-image", True), ("wan", False))


def asked(family: str, **other: Any) -> dict[str, Any]:
    return {**ASKED, **({"num_frames": 5} if family == "wan" else {}), **other}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    torch.compiler.reset()


def as_traced(self: CpuPlatform) -> CompileOptions:
    """Dynamo's part of compiling, without inductor's, which takes long."""

    def run_as_it_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return graph.forward

    return CompileOptions(backend=run_as_it_is)


@pytest.mark.parametrize(
    ("family", "regional"),
    [
        # Of regions the family whose prompts have two lengths, of whole transformers the one that
        # has two.
        *(
            pytest.param(
                *(family, regional),
                marks=[] if (family, regional) in USUAL else [pytest.mark.slow],
            )
            for family in FAMILIES
            for regional in (True, False)
        ),
    ],
)
def test_the_flags_reach_every_transformer(
    pipeline_folder: Folder, family: str, regional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "compile_options", as_traced)
    expected = pixels(load(pipeline_folder(family)), **asked(family))
    model = load(pipeline_folder(family), enable_torch_compile=True, regional_compile=regional)
    assert np.abs(pixels(model, **asked(family)) - expected).max() < 1e-3
    assert model.compiled is not None
    assert model.compiled.regions == (BLOCKS if regional else WHOLE)[family]
    # Qwen-Image's prompts with and without guidance have two lengths; the second graph takes any.
    lengths = 2 if family == "qwen-image" else 1
    if regional:
        assert model.compiled.log.graphs == lengths * len(BLOCKS[family])
        assert model.compiled.log.breaks == []


@pytest.mark.parametrize(
    "family",
    ["wan", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each != "wan")],
)
def test_resolutions_after_the_second_compile_nothing(
    pipeline_folder: Folder, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "compile_options", as_traced)
    model = load(pipeline_folder(family), enable_torch_compile=True, regional_compile=True)
    model.warm_up(DiffusionParams(**asked(family)))
    assert model.compiled is not None
    pixels(model, **asked(family))
    assert model.compiled.recompiles == 0, "nothing is compiled after the warm-up"
    counts = []
    for width in (80, 112, 64):
        pixels(model, **asked(family, width=width))
        counts.append(model.compiled.recompiles)
    assert counts == [len(BLOCKS[family])] * 3


def test_a_compiler_that_fails_is_left_out(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(CpuPlatform, "compile_options", lambda self: CompileOptions(backend=fail))
    expected = pixels(load(pipeline_folder("flux")), **asked("flux"))
    with caplog.at_level(logging.WARNING):
        model = load(pipeline_folder("flux"), enable_torch_compile=True, regional_compile=True)
        assert np.array_equal(pixels(model, **asked("flux")), expected)
    assert caplog.text.count("torch.compile failed, so the model runs eagerly") == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("regional", [True, False])
def test_inductor_gives_the_same_pixels(
    pipeline_folder: Folder, family: str, regional: bool
) -> None:
    expected = pixels(load(pipeline_folder(family)), **asked(family))
    model = load(pipeline_folder(family), enable_torch_compile=True, regional_compile=regional)
    assert np.abs(pixels(model, **asked(family)) - expected).max() < 1e-3
    assert model.compiled is not None and model.compiled.log.built >= 1
