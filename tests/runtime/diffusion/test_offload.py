"""Weights that wait in the CPU's memory. There is no device here that has its own: what diffusers
brings and takes away goes from the CPU to the CPU.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_pipelines import FAMILIES, Folder, load, pixels

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.compilation import CompileOptions
from piecework.runtime.diffusion.config import DiffusionConfig

ALL = {"dit_cpu_offload": True, "text_encoder_cpu_offload": True, "vae_cpu_offload": True}


def asked(family: str) -> dict[str, Any]:
    frames = {"num_frames": 1} if family == "wan" else {}
    return {"prompt": "a fox", "width": 64, "height": 64, "num_inference_steps": 2, **frames}


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "has_own_memory", True)


def offloaded(part: torch.nn.Module) -> set[str]:
    """Names of modules that diffusers brings in when they are run."""
    found = set()
    for name, module in part.named_modules():
        registry = getattr(module, "_diffusers_hook", None)
        if registry is not None and registry.get_hook("group_offloading") is not None:
            found.add(name)
    return found


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize("family", FAMILIES)
def test_offloading_changes_no_pixel(pipeline_folder: Folder, family: str) -> None:
    expected = pixels(load(pipeline_folder(family)), **asked(family))
    model = load(pipeline_folder(family), **ALL)
    blocks = {f"{name}.0" for name in ("transformer_blocks", "blocks")}
    for part in model.family.transformers().values():
        assert blocks & offloaded(part)
    assert np.array_equal(pixels(model, **asked(family)), expected)


@pytest.mark.usefixtures("own_memory")
def test_a_flag_is_for_its_parts_alone(pipeline_folder: Folder) -> None:
    for chosen in ALL:
        model = load(pipeline_folder("flux"), **{chosen: True})
        moved = {
            name
            for name, part in model.pipeline.components.items()
            if isinstance(part, torch.nn.Module) and offloaded(part)
        }
        expected = {
            "dit_cpu_offload": {"transformer"},
            "text_encoder_cpu_offload": {"text_encoder", "text_encoder_2"},
            "vae_cpu_offload": {"vae"},
        }
        assert moved == expected[chosen]


@pytest.mark.usefixtures("own_memory")
def test_blocks_that_are_compiled_are_brought_in_too(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CpuPlatform,
        "compile_options",
        lambda self: CompileOptions(backend=lambda graph, inputs: graph.forward),
    )
    torch.compiler.reset()
    expected = pixels(load(pipeline_folder("wan")), **asked("wan"))
    model = load(
        pipeline_folder("wan"),
        dit_cpu_offload=True,
        enable_torch_compile=True,
        regional_compile=True,
    )
    assert np.abs(pixels(model, **asked("wan")) - expected).max() < 1e-3
    assert "blocks.0" in offloaded(model.pipeline.transformer)
    assert model.compiled is not None and model.compiled.log.breaks == []


@pytest.mark.usefixtures("own_memory")
def test_a_device_that_cannot_copy_beside_its_work_is_one_line(pipeline_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"weights of transformer .* leave --pin-cpu-memory out"):
        load(pipeline_folder("flux"), dit_cpu_offload=True, pin_cpu_memory=True)


@pytest.mark.parametrize("flag", list(ALL))
def test_a_cpu_has_nowhere_to_take_them(pipeline_folder: Folder, flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: .* already; leave it out"):
        load(pipeline_folder("flux"), **{flag: True})


def test_an_offloaded_transformer_is_compiled_by_blocks_only() -> None:
    with pytest.raises(ValueError, match="add --regional-compile"):
        DiffusionConfig(dit_cpu_offload=True, enable_torch_compile=True)


def test_pinning_alone_has_no_effect(
    pipeline_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = load(pipeline_folder("flux"), pin_cpu_memory=True)
    assert "--pin-cpu-memory has no effect, because nothing is offloaded" in caplog.text
    assert not offloaded(model.pipeline.transformer)
