"""Latent attention by flashinfer's kernels, over a strict stand-in."""

from __future__ import annotations

from dataclasses import replace

import flashinfer_standin
import pytest
import torch
from flashinfer_standin import store
from paged_steps import Step, latent
from recording_platform import RecordingPlatform
from tried_here import TriedHere

from piecework.kernels.attention import KVLayout
from piecework.kernels.cuda import attention
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.cuda.attention import FlashInferAttention, obstacle
from piecework.kernels.cuda.platform import CudaPlatform
from piecework.kernels.triton import attention as triton_attention

LATENT, TURNED = 16, 8
DEEPSEEK = KVLayout(
    num_heads=16, num_kv_heads=1, key_size=576, value_size=512, scale=0.1,
    dtype=torch.bfloat16, latent=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_library", lambda: flashinfer_standin)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 1024)


def made(lens: list[tuple[int, int]], page_size: int, heads: int, seed: int) -> Step:
    size = LATENT + TURNED
    step = Step(lens, page_size=page_size, heads=heads, kv_heads=1, head_size=size, seed=seed)
    return latent(step, LATENT)


def test_a_recorded_decode_is_replayed_with_other_lengths() -> None:
    rows, page_size, heads = 4, 4, 4
    platform, used = RecordingPlatform(), FlashInferAttention(store)
    plan = used.capture_plan(8, 24, page_size, torch.device("cpu"))
    graph, inputs = platform.graph(), [torch.zeros(rows, heads, 24), torch.zeros(rows, 1, 24)]
    cache = torch.zeros(64, page_size, 1, LATENT + TURNED)

    def work() -> list[torch.Tensor]:
        q, k = inputs
        out = q.new_empty(rows, heads, LATENT)
        used.run(*(q, k, k[..., :LATENT], out, cache, cache[..., :LATENT]), plan, step.layout())
        return [out]

    for number, pasts in enumerate(([5, 20, 1], [30, 2, 9, 0], [3])):
        step = made([(1, past) for past in pasts], page_size, heads, number)
        cache.zero_()
        cache[1 : len(step.k_cache)] = step.k_cache[1:]
        used.update_plan(plan, step.metadata, rows)
        if number == 0:
            work()
            (out,) = graph.capture(work, platform.graph_pool(), platform.graph_stream())
        for static, part in zip(inputs, (step.q, step.new(step.keys)), strict=True):
            static[: len(part)] = part
        graph.replay()
        torch.testing.assert_close(
            out[: len(pasts)].double(), step.expected(), atol=1e-4, rtol=1e-4
        )
        assert out.isfinite().all(), "padding gives numbers"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(DEEPSEEK, dtype=torch.float32), "float32"),
        (replace(DEEPSEEK, cache_dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (replace(DEEPSEEK, softcap=3.0), "soft caps"),
        (replace(DEEPSEEK, key_size=288, value_size=256), "not of .256, 32."),
    ],
)
def test_it_says_which_latent_layers_it_takes(layer: KVLayout, reason: str) -> None:
    assert obstacle(DEEPSEEK) is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(obstacle(layer))


@pytest.mark.parametrize("works", [True, False])
def test_auto_takes_it_where_its_kernels_work(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of them: long prompts are expanded."""
    monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda: True)
    monkeypatch.setattr(cuda_platform, "TRIALS", TriedHere())
    monkeypatch.setattr(CudaPlatform, "device", lambda self: torch.device("cpu"))
    monkeypatch.setattr(triton_attention, "store_keys_and_values", store)
    if not works:
        wrapper = flashinfer_standin.BatchPrefillWithPagedKVCacheWrapper
        monkeypatch.setattr(wrapper, "run", lambda *given, **options: None)
    assert CudaPlatform().choose_attention("auto", [DEEPSEEK]) == (
        "flashinfer" if works else "torch"
    )
