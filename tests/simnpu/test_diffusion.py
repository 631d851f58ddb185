"""Diffusion pipelines on the simulated NPU: the pixels of a CPU, eager and compiled by torchair's
stand-in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diffusion_pipelines import FAMILIES, Folder, load, pixels
from mova_pipeline import BLOCKS, MovaPipeline
from sparse import sparse
from torchair_standin import StandIn

from piecework.compilation.regional import CompiledModels
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.image_params import DiffusionParams
from piecework.runtime.diffusion.clock import Clock
from piecework.runtime.diffusion.state import State
from piecework.runtime.diffusion.whole_pipeline import WholePipeline


def asked(family: str) -> dict[str, Any]:
    of_video = {"num_frames": 5} if family == "wan" else {}
    return {"prompt": "a fox", "seed": 3, "width": 64, "height": 64, "num_inference_steps": 2} | (
        of_video
    )


@pytest.mark.parametrize("family", sparse(FAMILIES, kept=["wan"]))
def test_a_pipeline_s_pixels_are_those_of_a_cpu(
    torchair: StandIn, pipeline_folder: Folder, family: str
) -> None:
    expected = pixels(load(pipeline_folder(family)), **asked(family))
    model = load(
        pipeline_folder(family), device="npu", enable_torch_compile=True, regional_compile=True
    )
    found = pixels(model, **asked(family))
    assert np.abs(found - expected).max() < 1e-4
    assert model.compiled is not None and model.compiled.log.breaks == []
    assert len(torchair.graphs) >= len(model.compiled.regions)


def run(pipeline: WholePipeline, platform: Any) -> np.ndarray:
    state = State(params=DiffusionParams(prompt="a fox", seed=1, num_inference_steps=2))
    pipeline.run(state, Clock(platform), lambda done, total: None)
    assert state.pixels is not None
    return state.pixels


def test_two_towers_and_a_bridge_are_compiled_by_blocks(torchair: StandIn) -> None:
    """MOVA's shape. Its towers are never called as a whole, so only blocks can be compiled."""
    platform = NpuPlatform()
    expected = run(WholePipeline(MovaPipeline()), platform)
    pipeline = WholePipeline(MovaPipeline().to("npu"))
    parts = pipeline.transformers()
    assert list(parts) == ["video_dit", "audio_dit", "dual_tower_bridge"]
    compiled = CompiledModels(parts, platform, regional=True)
    assert compiled.regions == {"TowerBlock": 2 * BLOCKS, "BridgeLayer": BLOCKS}
    assert np.abs(run(pipeline, platform) - expected).max() < 1e-5
    # A kind of block once for each shape: videos, audio, and the bridge.
    assert compiled.log.graphs == len(torchair.graphs) == 3 and compiled.log.breaks == []
