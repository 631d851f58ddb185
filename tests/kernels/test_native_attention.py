"""The C++ attention against the definition, in every variant that this machine can run; what happens without a compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.attention import NativeAttention, native_or_torch
from piecework.kernels.paged_attention import TorchAttention

LENS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4)


@pytest.fixture(scope="module", params=build.runnable_variants(), ids=lambda variant: variant.name)
def backend(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(build.load_variant(request.param))


@settings(deadline=None, max_examples=25)
@given(
    lens=LENS,
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([2, 6, 80]),
    head_size=st.sampled_from([1, 8, 33, 64]),
    window=st.sampled_from([None, 1, 4, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 5),
)
def test_it_equals_the_definition(
    backend: NativeAttention,
    lens: list[tuple[int, int]],
    page_size: int,
    heads: int,
    head_size: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    step = Step(lens, page_size=page_size, heads=heads, head_size=head_size, seed=seed, dtype=dtype)
    expected = step.expected(window)
    atol = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(step.run(backend, window=window, padding=2).float(), expected, atol=atol, rtol=1e-2)
    keys, values = step.stored()
    assert torch.equal(keys, step.new(step.keys)) and torch.equal(values, step.new(step.values))


@pytest.mark.parametrize("lens", [[(1, 32767)], [(1, 5000), (3, 2000), (1, 0)]])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_contexts_in_stretches_equal_plain_torch(backend: NativeAttention, lens: list[tuple[int, int]], threads: int) -> None:
    step = Step(lens, page_size=16, heads=6, head_size=64, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for window in (None, 1000):
            assert torch.allclose(step.run(backend, window=window), step.run(TorchAttention(), window=window), atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_a_request_without_new_tokens_is_passed_over(backend: NativeAttention) -> None:
    step = Step([(1, 20), (0, 5), (2, 3)], page_size=16, heads=6, seed=1)
    assert torch.allclose(step.run(backend), step.run(TorchAttention()), atol=1e-5)


def test_scores_far_apart_stay_finite(backend: NativeAttention) -> None:
    step = Step([(1, 600), (2, 40)], page_size=16, heads=6, head_size=64, seed=2)
    step.scale = 50.0
    assert torch.allclose(step.run(backend), step.expected(None), atol=1e-3)


def test_without_a_compiler_plain_torch_runs_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            backends = [native_or_torch(), native_or_torch()]
    finally:
        build.load_kernels.cache_clear()
    assert [type(made) for made in backends] == [TorchAttention, TorchAttention]
    assert [record.message for record in caplog.records if "no native CPU kernels" in record.message] == [
        "no native CPU kernels, plain torch runs instead (install g++ or clang++, or name one in $CXX): this machine has no C++ compiler"
    ]


def test_a_build_is_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    portable = build.VARIANTS[-1]
    build.load_variant(portable)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "native").glob("*.so")}
    build.load_variant(portable)
    assert len(made) == 1 and {path: path.stat().st_mtime_ns for path in (tmp_path / "native").glob("*.so")} == made
    assert capfd.readouterr().err.count("building the CPU kernels (portable)") == 1
