"""The KV cache gets what steps and graphs leave of the memory: all graphs fit beside it, and little
stays unused.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_here import CompiledHere
from sparse import sparse
from tiny_models import make_tiny_model
from tiny_vision import FAMILIES, make_tiny_vision

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.executor.memory_profile import profile_memory
from piecework.runtime.llm import LLM

MEMORY = 96 * 2**20
"""What the device has for one engine here: the cache could fill all of it."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, packed_simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))
    monkeypatch.setattr(NpuPlatform, "compiler_bytes", 0)


def engine(folder: Path, simnpu: Any, **settings: Any) -> LLM:
    """With a wide vocabulary, so that sampling takes memory too."""
    path = make_tiny_model(
        folder / "model", num_hidden_layers=2, vocab_size=4096, max_position_embeddings=8192
    )
    fixed: dict[str, Any] = {
        "chunked_prefill_size": 256,
        "max_running_requests": 96,
        "cuda_graph_bs": "1,4,16,64,96",
    }
    fixed |= settings
    with simnpu.limits(total_memory=torch.npu.memory_reserved() + MEMORY):
        return LLM(str(path), device="npu", dtype="float32", num_threads=1, **fixed)


@pytest.mark.parametrize(
    "backend",
    [
        "piecewise",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("breakable", "disabled")),
    ],
)
def test_every_graph_fits_beside_a_cache_that_takes_the_rest(
    tmp_path: Path, simnpu: Any, backend: str
) -> None:
    llm = engine(tmp_path, simnpu, cuda_graph_backend_prefill=backend)
    graphs = llm.info.graphs
    assert graphs.failed_sizes == {} and graphs.decode_sizes == [1, 4, 16, 64, 96]
    assert bool(graphs.prefill_sizes) is (backend != "disabled")
    # The first engine of a process also makes attention's mask.
    assert llm.info.kv_bytes > 0.65 * MEMORY


@pytest.mark.slow
def test_the_profile_leaves_nothing_behind(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int, int]] = []

    def twice(*arguments: Any) -> int:
        """The first time attention makes its mask, which it keeps."""
        profile_memory(*arguments)
        held.append((torch.npu.memory_allocated(), torch.npu.memory_reserved(), simnpu.live_graphs))
        free = profile_memory(*arguments)
        held.append((torch.npu.memory_allocated(), torch.npu.memory_reserved(), simnpu.live_graphs))
        return free

    monkeypatch.setattr(model_runner, "profile_memory", twice)
    engine(tmp_path, simnpu, cuda_graph_backend_prefill="breakable")
    first, second = held
    assert first == second


@pytest.mark.parametrize("is_frozen", sparse([True, False], kept=[True]))
def test_objects_are_frozen_after_the_profile_where_they_were_before(
    tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    kept: list[object] = [[]]
    found: list[bool] = []

    def profile(*arguments: Any) -> int:
        if is_frozen:
            gc.freeze()
        free = profile_memory(*arguments)
        found.append(all(each is not kept[0] for each in gc.get_objects()))
        gc.unfreeze()
        return free

    monkeypatch.setattr(model_runner, "profile_memory", profile)
    engine(tmp_path, simnpu, cuda_graph_backend_prefill="disabled", cuda_graph_bs="1,4")
    assert found == [is_frozen]


def test_the_encoder_of_images_and_its_results_have_their_memory(
    tmp_path: Path, simnpu: Any
) -> None:
    """What the KV cache does not get is what encoding took, and the results that are kept."""
    vision = FAMILIES["llava"][2]["vision_config"] | {"image_size": 64, "patch_size": 4}
    wide = {"vision_config": vision | {"intermediate_size": 4096}}
    path, results = make_tiny_vision(tmp_path / "vision", "llava", **wide), 64 * 2**20
    processor = json.loads((path / "preprocessor_config.json").read_text())
    processor |= {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    # Hidden numbers of 256 patches.
    wide_layer = 256 * 4096 * 4
    settings: dict[str, Any] = {
        "device": "npu", "dtype": "float32", "num_threads": 1, "disable_cuda_graph": True,
        "mm_cache_bytes": results,
    }  # fmt: skip
    found = []
    for disable_vision in (True, False):
        with simnpu.limits(total_memory=torch.npu.memory_reserved() + MEMORY + results):
            llm = LLM(str(path), disable_vision=disable_vision, **settings)
        found.append(llm.info.kv_bytes + llm.info.weight_bytes)
        del llm
        gc.collect()
        torch.npu.empty_cache()
    text, with_images = found
    assert wide_layer < text - with_images - results < 6 * wide_layer


def test_steps_that_do_not_fit_name_what_makes_them_smaller(tmp_path: Path, simnpu: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"too little memory for steps of 256 tokens and 4096 requests: lower --chunked",
    ):
        engine(tmp_path, simnpu, max_running_requests=4096)
