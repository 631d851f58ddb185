"""The C++ attention against the definition, in every variant that this machine can run; what
happens without a compiler.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_variants import AttentionWay, attention_ways, errors_of
from paged_steps import Step, kept, latent, quantized

from piecework.kernels import cache_format
from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.attention import native_or_torch
from piecework.kernels.paged_attention import TorchAttention

LENS = st.one_of(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 150)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 150)), min_size=1, max_size=2),
)


@pytest.fixture(scope="module")
def variants() -> list[AttentionWay]:
    """Every way that this machine can run them, the best first."""
    return attention_ways()


def exact(step: Step, window: int | None = None) -> torch.Tensor:
    """The definition in float64, all at once."""
    rows = []
    for q, keys, values in zip(
        step.q.double().split(step.query_lens), step.keys, step.values, strict=True
    ):
        group = q.shape[1] // keys.shape[1]
        keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
        key, position = (
            torch.arange(len(keys)),
            torch.arange(len(keys) - len(q), len(keys))[:, None],
        )
        hidden = (key > position) | (key <= position - (window or len(keys)))
        scores = torch.einsum("nhd,shd->hns", q, keys) * step.heads.scale
        if (cap := step.heads.softcap) is not None:
            scores = cap * (scores / cap).tanh()
        if step.heads.slopes is not None:
            scores += step.heads.slopes.double()[:, None, None] * (key - position)
        scores = scores.masked_fill(hidden, float("-inf"))
        if step.heads.sinks is not None:
            sinks = step.heads.sinks.double()[:, None, None].expand(-1, scores.shape[1], -1)
            scores = torch.cat((scores, sinks), -1)
        rows.append(torch.einsum("hns,shd->nhd", scores.softmax(-1)[..., : len(keys)], values))
    return torch.cat(rows)


@settings(max_examples=40)
@given(
    lens=LENS,
    page_size=st.sampled_from([1, 3, 16, 64, 128]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([*range(1, 9), 40]),
    head_size=st.sampled_from([1, 8, 33, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 4, 50, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(
    lens=[(5, 0), (0, 9), (1, 63), (1, 64), (70, 65)],
    page_size=16,
    kv_heads=3,
    group=3,
    head_size=64,
    window=None,
    dtype=torch.bfloat16,
)
@example(  # more rows than a block of AVX2's has
    lens=[(1, 150), (1, 64)],
    page_size=16,
    kv_heads=2,
    group=7,
    head_size=64,
    window=100,
    dtype=torch.bfloat16,
)
@example(
    lens=[(0, 5)], page_size=16, kv_heads=1, group=1, head_size=8, window=None, dtype=torch.float32
)
def test_it_equals_the_definition(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    page_size: int,
    kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    step = Step(
        lens,
        page_size=page_size,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        seed=len(lens),
        dtype=dtype,
    )
    expected = exact(step, window)
    for backend in variants:
        found = step.run(backend, window=window, padding=2).double()
        assert torch.allclose(found, expected, **errors_of(backend, dtype))
        keys, values = step.stored()
        assert torch.equal(keys, step.new(step.keys)) and torch.equal(values, step.new(step.values))


@settings(max_examples=10)
@given(
    lens=LENS,
    heads=st.sampled_from([1, 4, 5, 40, 128]),
    sizes=st.sampled_from([(576, 512), (48, 32), (33, 20), (40, 39)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(lens=[(1, 150), (2, 70)], heads=3, sizes=(576, 512), dtype=torch.bfloat16)
@example(lens=[(1, 150), (9, 70)], heads=16, sizes=(576, 512), dtype=torch.bfloat16)
def test_values_may_be_the_beginnings_of_keys(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Latent attention, which stores a token once."""
    shape = {"page_size": 16, "heads": heads, "kv_heads": 1, "head_size": sizes[0]}
    step = latent(Step(lens, **shape, seed=len(lens), dtype=dtype), sizes[1])
    expected = exact(step)
    for backend in (*variants, TorchAttention()):
        found = step.run(backend, padding=2).double()
        assert torch.allclose(found, expected, **errors_of(backend, dtype))
        assert torch.equal(step.stored()[0], step.new(step.keys))


@settings(max_examples=10)
@given(
    lens=LENS,
    kv_heads=st.integers(2, 3),
    group=st.sampled_from([2, 3, 8]),
    head_size=st.sampled_from([8, 33, 64]),
    cut=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_first_and_the_last_group_of_heads_may_be_cut(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_size: int,
    cut: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """As a rank has them that shares a key/value head unevenly."""
    step = Step(
        lens,
        page_size=16,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        seed=len(lens),
        dtype=dtype,
    )
    skipped, missing = (number % group for number in cut)
    kept_heads = slice(skipped, group * kv_heads - missing)
    expected = exact(step)[:, kept_heads]
    step.q = step.q[:, kept_heads].contiguous()
    step.heads = replace(
        step.heads, num_heads=step.q.shape[1], group_size=group, skipped_heads=skipped
    )
    for backend in (variants[0], TorchAttention()):
        found = step.run(backend, padding=2).double()
        assert torch.allclose(found, expected, **errors_of(backend, dtype))


@settings(max_examples=12)
@given(
    lens=LENS,
    group=st.sampled_from([1, 3, 8]),
    head_size=st.sampled_from([8, 33, 64]),
    window=st.sampled_from([None, 4, 50]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sink=st.sampled_from([None, -1e4, 0.0, 3.0, 1e4]),
    slope=st.sampled_from([None, 0.0, 0.01, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(  # decodes that begin alike, and long ones, which are cut into chunks
    lens=[(1, 1500), (1, 130), (1, 131)],
    group=1,
    head_size=64,
    window=None,
    softcap=None,
    sink=None,
    slope=0.01,
    dtype=torch.float32,
)
def test_soft_caps_sinks_and_slopes_are_those_of_the_definition(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    group: int,
    head_size: int,
    window: int | None,
    softcap: float | None,
    sink: float | None,
    slope: float | None,
    dtype: torch.dtype,
) -> None:
    step = Step(
        lens,
        page_size=16,
        heads=2 * group,
        kv_heads=2,
        head_size=head_size,
        seed=len(lens),
        dtype=dtype,
    )
    sinks = None if sink is None else sink + torch.arange(2 * group) / 4
    slopes = None if slope is None else slope / torch.arange(1, 2 * group + 1)
    step.heads = replace(step.heads, softcap=softcap, sinks=sinks, slopes=slopes)
    expected = exact(step, window)
    for backend in (TorchAttention(), *variants):
        given_by = step.run(backend, window=window).double()
        assert torch.allclose(given_by, expected, **errors_of(backend, dtype))


@settings(max_examples=12)
@given(
    lens=LENS,
    page_size=st.sampled_from([1, 3, 16, 64]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8, 40]),
    head_size=st.sampled_from([8, 26, 64, 80, 128]),
    window=st.sampled_from([None, 4, 50]),
    cache=st.sampled_from(list(CACHE_DTYPES.values())),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 0.03)]),
)
def test_it_stores_and_reads_8_bits_as_the_reference_does(
    variants: list[AttentionWay],
    lens: list[tuple[int, int]],
    page_size: int,
    kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    cache: torch.dtype,
    scales: tuple[float, float],
) -> None:
    plain = Step(
        lens,
        page_size=page_size,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        seed=len(lens),
        dtype=torch.bfloat16,
    )
    step, keys, values = quantized(plain, cache, scales)
    before, new = (step.k_cache, step.v_cache), (step.keys, step.values)
    stored = [each.clone() for each in before]
    for tokens, part, scale in zip(new, stored, scales, strict=True):
        cache_format.store(step.new(tokens), part, step.metadata.slot_mapping, scale)
    for backend in variants:
        step.keys, step.values = new
        step.k_cache, step.v_cache = (each.clone() for each in before)
        out = step.run(backend, window=window, padding=2)
        for found, wanted in zip((step.k_cache, step.v_cache), stored, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        step.keys, step.values = keys, values
        expected = exact(step, window)
        assert torch.allclose(out.double(), expected, **errors_of(backend, torch.bfloat16))


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
    expected = exact(step)
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
        expected = exact(step, window)
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


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_equals_plain_torch(variants: list[AttentionWay]) -> None:
    step = Step([(32768, 0)], page_size=16, heads=2, kv_heads=1, head_size=64, seed=1)
    assert torch.allclose(step.run(variants[0]), step.run(TorchAttention()), atol=1e-5)


def test_scores_far_apart_stay_finite(variants: list[AttentionWay]) -> None:
    step = Step([(1, 600), (90, 40)], page_size=16, heads=6, head_size=64, seed=2)
    step.heads = replace(step.heads, scale=50.0)
    for backend in variants:
        assert torch.allclose(step.run(backend).double(), exact(step), atol=2e-3)


def test_a_key_that_is_not_a_number_reaches_those_who_see_it_and_nobody_else(
    variants: list[AttentionWay],
) -> None:
    step = Step([(90, 0), (3, 40)], page_size=16, heads=6, head_size=64, seed=2)
    step.keys[0][70] = float("nan")
    for backend in variants:
        out = step.run(backend)
        assert out[70:90].isnan().all() and torch.cat([out[:70], out[90:]]).isfinite().all()


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
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build, "runnable_variants", lambda: [best, next_best, build.VARIANTS[-1]])
    monkeypatch.setattr(build, "instruction_sets", lambda: best.needs)
    build.load_kernels.cache_clear()
    try:
        library = build.load_kernels()
    finally:
        build.load_kernels.cache_clear()
    assert library is not None and library.answer() == 42
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.so")] == [next_best.name]
    assert f"({best.name})" not in capfd.readouterr().err
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
    monkeypatch.setattr(build, "_SOURCES", sources)
    portable = build.VARIANTS[-1]
    assert build.load_variant(portable).answer() == 42
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")}
    assert build.load_variant(portable).answer() == 42
    assert (
        len(made) == 1 and {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")} == made
    )
    assert capfd.readouterr().err.count("building the CPU kernels (portable)") == 1
