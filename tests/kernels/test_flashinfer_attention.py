"""What is special about attention by flashinfer: its plans, its replay by address, which layers it
takes and when it is chosen. A strict stand-in runs everywhere, flashinfer itself on a GPU.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from typing import Any

import flashinfer_standin
import pytest
import torch
from flashinfer_standin import store
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step, quantized
from recording_platform import RecordingPlatform
from tried_here import TriedHere

from piecework.kernels.attention import KVLayout
from piecework.kernels.cuda import attention, libraries
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.cuda.attention import (
    FlashInferAttention,
    FlashInferDecodePlan,
    FlashInferPlan,
    obstacle,
)
from piecework.kernels.cuda.platform import CudaPlatform
from piecework.kernels.platform import detect
from piecework.kernels.triton import attention as triton_attention
from piecework.kernels.triton import device as devices

ON_GPU = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None


def backend() -> FlashInferAttention:
    return FlashInferAttention(store)


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
        monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 1024)


def test_layers_that_differ_by_scales_alone_share_one_plan() -> None:
    step, _, _ = quantized(Step([(1, 9)], page_size=4, heads=2, seed=1), torch.float8_e4m3fn)
    used = backend()
    for scale in (1.0, 0.5):
        step.heads = replace(step.heads, k_scale=scale, v_scale=scale)
        step.run(used)
    assert len(used._calls) == 1


def run(
    used: FlashInferAttention,
    step: Step,
    plan: FlashInferPlan | FlashInferDecodePlan,
    window: int | None = None,
) -> torch.Tensor:
    """The step by a plan that was made before it."""
    q, keys, values = step.q, step.new(step.keys), step.new(step.values)
    out = torch.full_like(q, float("nan"))
    used.run(q, keys, values, out, step.k_cache, step.v_cache, plan, step.layout(window))
    return out


def padded(step: Step, rows: int) -> tuple[torch.Tensor, ...]:
    parts = (step.q, step.new(step.keys), step.new(step.values))
    return tuple(
        torch.cat((part, torch.full((rows - len(part), *part.shape[1:]), 7.0))) for part in parts
    )


@settings(max_examples=20)
@given(
    steps=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=2, max_size=4),
    heads=st.sampled_from([4, 14]),
    window=st.sampled_from([None, 7]),
)
def test_a_recorded_decode_is_replayed_with_other_lengths(
    steps: list[list[int]], heads: int, window: int | None
) -> None:
    """By address alone, as a device replays: what was planned outside the graph is all that
    differs.
    """
    rows, page_size = 4, 4
    inputs: list[torch.Tensor] = []
    platform, used = RecordingPlatform(), backend()
    plan = used.capture_plan(8, 24, page_size, torch.device("cpu"))
    graph = platform.graph()
    k_cache, v_cache = torch.zeros(64, page_size, 2, 8), torch.zeros(64, page_size, 2, 8)
    layout = KVLayout.of_heads(heads, 2, 8, torch.float32, window=window)

    def work() -> list[torch.Tensor]:
        out = torch.empty_like(inputs[0])
        used.run(*inputs, out, k_cache, v_cache, plan, layout)
        return [out]

    for number, pasts in enumerate(steps):
        step = Step([(1, past) for past in pasts], page_size=page_size, heads=heads, seed=number)
        for cache, wanted in ((k_cache, step.k_cache), (v_cache, step.v_cache)):
            cache.zero_()
            cache[1 : len(wanted)] = wanted[1:]
        used.update_plan(plan, step.metadata, rows)
        if number == 0:
            inputs = [part.clone() for part in padded(step, rows)]
            work()
            (out,) = graph.capture(work, platform.graph_pool(), platform.graph_stream())
        for static, part in zip(inputs, padded(step, rows), strict=True):
            static.copy_(part)
        graph.replay()
        torch.testing.assert_close(
            out[: len(pasts)].double(), step.expected(window), atol=1e-4, rtol=1e-4
        )
        assert out.isfinite().all(), "padding gives numbers"
        places = step.metadata.slot_mapping
        assert torch.equal(k_cache.flatten(0, 1)[places], step.new(step.keys)), (
            "what is padded stores nothing where requests do"
        )


def test_two_steps_may_be_planned_before_either_runs() -> None:
    used = backend()
    steps = [
        Step([(1, 9), (1, 3)], page_size=4, heads=4, seed=0),
        Step([(1, 2)], page_size=4, heads=4, seed=1),
    ]
    plans = [used.plan(step.metadata, 4) for step in steps]
    for step, plan in zip(steps, plans, strict=True):
        out = run(used, step, plan)
        torch.testing.assert_close(out.double(), step.expected(), atol=1e-4, rtol=1e-4)


def test_layers_that_agree_share_one_plan_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = flashinfer_standin.BatchDecodeWithPagedKVCacheWrapper.plan

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        planned.append(kwargs["window_left"])
        plan(self, *args, **kwargs)

    monkeypatch.setattr(flashinfer_standin.BatchDecodeWithPagedKVCacheWrapper, "plan", counted)
    step, used = Step([(1, 9), (1, 3)], page_size=4, heads=4, seed=0), backend()
    fixed = used.plan(step.metadata, 4)
    for window in (None, 4, None, 4):
        run(used, step, fixed, window)
    assert planned == [-1, 3]


LAYOUT = KVLayout.of_heads(32, 8, 128, torch.bfloat16)


def test_it_says_which_models_it_takes() -> None:
    assert (
        obstacle(LAYOUT) is None
        and obstacle(replace(LAYOUT, key_size=64, value_size=64, dtype=torch.float16)) is None
    )
    assert "float32" in (obstacle(replace(LAYOUT, dtype=torch.float32)) or "")
    assert obstacle(replace(LAYOUT, cache_dtype=torch.float8_e4m3fn)) is None
    assert "int8" in (obstacle(replace(LAYOUT, cache_dtype=torch.int8)) or "")
    assert "slopes" in (obstacle(replace(LAYOUT, slopes=torch.ones(32))) or "")
    assert "80" in (obstacle(replace(LAYOUT, key_size=80, value_size=80)) or "")


@pytest.fixture
def with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda: True)
    monkeypatch.setattr(cuda_platform, "TRIALS", TriedHere())
    monkeypatch.setattr(CudaPlatform, "device", lambda self: torch.device("cpu"))
    monkeypatch.setattr(triton_attention, "store_keys_and_values", store)


def test_auto_takes_flashinfer_where_it_can(with_flashinfer: None) -> None:
    platform = CudaPlatform()
    assert isinstance(platform.attention_backend("auto", [LAYOUT]), FlashInferAttention)
    assert isinstance(platform.attention_backend("flashinfer", [LAYOUT]), FlashInferAttention)
    for other in (
        replace(LAYOUT, dtype=torch.float32),
        replace(LAYOUT, cache_dtype=torch.int8),
        replace(LAYOUT, key_size=80, value_size=80),
    ):
        assert not isinstance(platform.attention_backend("auto", [other]), FlashInferAttention)
        with pytest.raises(
            ValueError, match=r"--attention-backend flashinfer: flashinfer .*; choose auto"
        ):
            platform.attention_backend("flashinfer", [other])


def no_kernels(*_: Any) -> None:
    raise RuntimeError("Ninja build failed.\nnvcc fatal: Unsupported gpu architecture")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (no_kernels, "do not work here .*Unsupported gpu"),
        (
            lambda self, q, caches, out, scales: out.zero_(),
            "other numbers here, off by a share of 1",
        ),
    ],
    ids=["kernels that cannot be built", "wrong numbers"],
)
def test_where_its_kernels_fail_auto_is_triton(
    broken: Any,
    reason: str,
    with_flashinfer: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(attention._Call, "run", broken)
    platform = CudaPlatform()
    for _ in range(2):
        assert platform.choose_attention("auto", [LAYOUT]) == "triton"
    assert len([record for record in caplog.records if re.search(reason, record.getMessage())]) == 1
    with pytest.raises(
        ValueError,
        match=rf"--attention-backend flashinfer: its kernels .*{reason.split()[0]}.*; choose auto",
    ):
        platform.choose_attention("flashinfer", [LAYOUT])


def test_without_flashinfer_auto_is_triton_and_asking_for_it_gives_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda: False)
    platform = CudaPlatform()
    assert type(platform.attention_backend("auto", [LAYOUT])).__name__ == "TritonAttention"
    with pytest.raises(ValueError, match=r"needs flashinfer-python .*pip install"):
        platform.attention_backend("flashinfer")


def test_a_gpu_without_memory_for_a_tile_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda: False)
    small = devices.Properties((8, 6), 84, 4096)
    monkeypatch.setattr(devices, "properties", lambda device: small)
    platform = CudaPlatform()
    assert platform.choose_attention("auto", [LAYOUT]) == "torch"
    with pytest.raises(ValueError, match=r"bytes of shared memory.* 4096"):
        platform.choose_attention("triton", [LAYOUT])


def test_flashinfer_without_what_builds_its_kernels_is_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"flashinfer", "triton"}
    monkeypatch.setattr(libraries, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert not libraries.has_flashinfer()
    found.add("flashinfer_jit_cache")
    assert libraries.has_flashinfer()
    found.remove("flashinfer")
    assert not libraries.has_flashinfer()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU with flashinfer")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (8, 8)])
@pytest.mark.parametrize(
    "lens", [[(517, 300), (1, 900), (33, 0), (1, 0)], [(1, past) for past in range(1, 1200, 37)]]
)
def test_shapes_of_real_models(
    lens: list[tuple[int, int]], heads: tuple[int, int], window: int | None
) -> None:
    from piecework.kernels.paged_attention import TorchAttention

    step = Step(
        lens,
        page_size=16,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=128,
        seed=1,
        dtype=torch.bfloat16,
        device="cuda",
    )
    used = detect.detect("cuda").attention_backend("flashinfer")
    actual, expected = (
        step.run(one, window=window, padding=3).float() for one in (used, TorchAttention())
    )
    assert float((actual - expected).norm()) <= 1e-2 * float(expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU with flashinfer")
def test_a_cuda_graph_is_replayed_with_other_lengths() -> None:
    used, device = detect.detect("cuda").attention_backend("flashinfer"), torch.device("cuda")
    assert isinstance(used, FlashInferAttention)
    plan, graph, rows = used.capture_plan(8, 100, 16, device), torch.cuda.CUDAGraph(), 4
    shape: dict[str, Any] = {
        "page_size": 16,
        "heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    steps = [
        Step([(1, past) for past in pasts], seed=3, **shape)
        for pasts in ([5, 70, 1, 900], [1200, 3], [0, 0, 640])
    ]
    largest = max(len(step.k_cache) for step in steps)
    k_cache, v_cache = (
        torch.zeros(largest, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    q, k, v = (
        torch.zeros(rows, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8)
    )
    out = torch.empty_like(q)
    for number, step in enumerate(steps):
        k_cache[: len(step.k_cache)], v_cache[: len(step.v_cache)] = step.k_cache, step.v_cache
        k_cache[0], v_cache[0] = 0, 0
        for static, part in ((q, step.q), (k, step.new(step.keys)), (v, step.new(step.values))):
            static[: len(part)] = part
        used.update_plan(plan, step.metadata, rows)
        if number == 0:
            for recording in (False, True):
                with (
                    torch.cuda.graph(graph)
                    if recording
                    else torch.cuda.stream(torch.cuda.current_stream())
                ):
                    used.run(q, k, v, out, k_cache, v_cache, plan, step.layout())
        graph.replay()
        expected = step.expected(None).to(device)
        assert float((out[: len(step.q)].float() - expected).norm()) <= 1e-2 * float(
            expected.norm()
        )
