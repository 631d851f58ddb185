"""What is special about the C++ attention: its blocks, stretches, precision and threads, in every
variant that this machine can run; and what happens without a compiler.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_variants import AttentionWay, attention_ways, errors_of
from paged_steps import Step, kept, latent, quantized

from piecework.kernels import reference
from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cpu.native import build, parts
from piecework.kernels.cpu.native.attention import native_or_torch
from piecework.kernels.paged_attention import TorchAttention


@pytest.fixture(scope="module")
def variants() -> list[AttentionWay]:
    """Every way that this machine can run them, the best first."""
    return attention_ways()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("lens", "group", "window"),
    [
        ([(5, 0), (0, 9), (1, 63), (1, 64), (70, 65)], 3, None),
        ([(1, 150), (1, 64)], 7, 100),
        ([(0, 5)], 1, None),
    ],
    ids=["borders", "more rows than a block of AVX2", "no tokens"],
)
def test_blocks_of_rows_and_keys_may_be_of_any_size(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    group: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    step = Step(lens, page_size=16, heads=2 * group, head_size=64, seed=1, dtype=dtype)
    for backend in variants:
        found = step.run(backend, window=window, padding=2).double()
        assert torch.allclose(found, step.expected(window), **errors_of(backend, dtype))


def test_slopes_reach_over_the_stretches_of_long_decodes(variants: list[AttentionWay]) -> None:
    step = Step([(1, 1500), (1, 130), (1, 131)], page_size=16, heads=2, head_size=64, seed=3)
    step.heads = replace(step.heads, slopes=0.01 / torch.arange(1, 3))
    for backend in variants:
        found = step.run(backend).double()
        assert torch.allclose(found, step.expected(), **errors_of(backend, torch.float32))


@pytest.mark.parametrize("heads", [3, 16])
def test_latent_decodes_and_chunks_of_the_published_size(
    variants: list[AttentionWay], heads: int
) -> None:
    shape = {"page_size": 16, "heads": heads, "kv_heads": 1, "head_size": 576}
    step = latent(Step([(1, 150), (9, 70)], **shape, seed=2, dtype=torch.bfloat16), 512)
    for backend in variants:
        found = step.run(backend, padding=2).double()
        assert torch.allclose(found, step.expected(), **errors_of(backend, torch.bfloat16))


@pytest.mark.parametrize("cache", CACHE_DTYPES.values(), ids=CACHE_DTYPES)
def test_every_number_of_8_bits_is_stored_and_read_as_the_reference_does(
    variants: list[AttentionWay], cache: torch.dtype
) -> None:
    """One token that sees itself alone gets its own value: all bfloat16 numbers, one a row."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for rows in (bits.view(-1, 1, 64), bits.view(64, 1, -1).transpose(0, 2).contiguous()):
        lens = [(1, 0)] * len(rows)
        step, _, _ = quantized(
            Step(lens, page_size=16, heads=1, kv_heads=1, head_size=64, seed=0, dtype=bits.dtype),
            cache,
        )
        expected = kept(rows.float(), cache)
        step.values = list(rows[:, None])
        for backend in variants:
            found = step.run(backend).float()
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.bfloat16().float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "lens",
    [[(600, 0)], [(100, 700)], [(1, 2000), (1, 100), (1, 0)]],
    ids=["prompt", "chunk", "decodes"],
)
def test_it_errs_no_more_than_plain_torch(
    variants: list[AttentionWay], lens: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    step = Step(lens, page_size=16, heads=6, head_size=64, seed=3, dtype=dtype)
    expected = step.expected()
    torch_error = (step.run(TorchAttention()).double() - expected).abs().mean()
    assert 0 < torch_error < 1e-3
    for backend in variants:
        assert (step.run(backend).double() - expected).abs().mean() < 1.02 * torch_error


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    "lens", [[(1, 32767)], [(40, 3000), (1, 2000), (1, 0)]], ids=["decode", "mixed"]
)
def test_long_contexts_are_cut_into_stretches(
    variants: list[AttentionWay], lens: list[tuple[int, int]], threads: int
) -> None:
    step = Step(lens, page_size=16, heads=6, head_size=64, seed=1)
    before = torch.get_num_threads()
    for window in (None, 1000):
        expected = step.expected(window)
        torch.set_num_threads(threads)
        try:
            for backend in variants:
                assert torch.allclose(
                    step.run(backend, window=window).double(), expected, atol=1e-5
                )
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.int8], ids=str)
def test_decodes_give_the_same_bits_whether_their_heads_are_read_together_or_apart(
    variants: list[AttentionWay], cache: torch.dtype | None, window: int | None
) -> None:
    lens = [(1, past) for past in (0, 17, 63, 200, 300, 64, 129)]
    step = Step(
        lens, page_size=16, heads=15, kv_heads=5, head_size=64, seed=1, dtype=torch.bfloat16
    )
    if cache is not None:
        step, *_ = quantized(step, cache, (1.0, 1.0))
    before, given_by = torch.get_num_threads(), list[list[torch.Tensor]]()
    try:
        for threads in (1, len(lens)):
            torch.set_num_threads(threads)
            given_by.append([step.run(backend, window=window) for backend in variants])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *given_by))


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    "lens", [[(70, 30), (1, 90), (3, 0)], [(1, 2000), (1, 5)]], ids=["mixed", "stretches"]
)
def test_a_result_in_fp8_is_its_own_result_quantised(
    variants: list[AttentionWay], lens: list[tuple[int, int]], dtype: torch.dtype, head_size: int
) -> None:
    """To the bit. Plain torch quantises what the kernels do not: float8_e5m2."""
    step = Step(lens, page_size=16, heads=4, head_size=head_size, seed=1, dtype=torch.bfloat16)
    scale = torch.tensor([0.0013])
    for backend in variants:
        plain = step.run(backend)
        assert plain.abs().max() > 0.0013 * 448, "some numbers are too large"
        expected = reference.quantize_static(plain.flatten(1), scale, dtype).view(plain.shape)
        found = step.run_quantized(backend, scale, dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(step.run(backend), plain)


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_equals_plain_torch(variants: list[AttentionWay]) -> None:
    step = Step([(32768, 0)], page_size=16, heads=2, kv_heads=1, head_size=64, seed=1)
    assert torch.allclose(step.run(variants[0]), step.run(TorchAttention()), atol=1e-5)


def test_scores_far_apart_stay_finite(variants: list[AttentionWay]) -> None:
    step = Step([(1, 600), (90, 40)], page_size=16, heads=6, head_size=64, seed=2)
    step.heads = replace(step.heads, scale=50.0)
    for backend in variants:
        assert torch.allclose(step.run(backend).double(), step.expected(), atol=2e-3)


def test_another_dtype_runs_in_plain_torch(variants: list[AttentionWay]) -> None:
    step = Step([(5, 20), (1, 16)], page_size=16, heads=6, seed=1, dtype=torch.float16)
    assert torch.equal(step.run(variants[0]), step.run(TorchAttention()))


def test_without_a_compiler_plain_torch_runs_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            backends = [native_or_torch(), native_or_torch()]
    finally:
        build.load_kernels.cache_clear()
    assert [type(made) for made in backends] == [TorchAttention, TorchAttention]
    assert [
        record.message for record in caplog.records if "no native CPU kernels" in record.message
    ] == [
        "no native CPU kernels, plain torch runs instead (install g++ or clang++, or name one in "
        "$CXX): this machine has no C++ compiler"
    ]


def test_a_compiler_that_lacks_a_flag_makes_the_next_best_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sources, compiler = tmp_path / "sources", tmp_path / "old-compiler"
    best, next_best = build.VARIANTS[:2]
    sources.mkdir()
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{best.flags[-1]}*) echo "unrecognized option" >&2; exit 1;; '
        'esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(parts, "SOURCES", sources)
    monkeypatch.setattr(build, "runnable_variants", lambda: [best, next_best, build.VARIANTS[-1]])
    monkeypatch.setattr(build, "instruction_sets", lambda: best.needs)
    build.load_kernels.cache_clear()
    try:
        library = build.load_kernels()
    finally:
        build.load_kernels.cache_clear()
    assert library is not None and library.answer() == 42
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.so")] == [next_best.name]
    assert "unrecognized option" not in capfd.readouterr().err
    assert [record.message for record in caplog.records] == [
        f"the CPU kernels are {next_best.name} instead of {best.name}: {compiler} failed: "
        "unrecognized option"
    ]


def test_a_build_is_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path))
    monkeypatch.setattr(parts, "SOURCES", sources)
    portable = build.VARIANTS[-1]
    assert build.load_variant(portable).answer() == 42
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")}
    assert build.load_variant(portable).answer() == 42
    assert (
        len(made) == 1 and {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")} == made
    )
    assert capfd.readouterr().err.count("compiled CPU kernels (portable)") == 1
