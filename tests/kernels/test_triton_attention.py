"""Triton's paged attention against the definition: on a GPU for real, elsewhere through Triton's
interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import Step, quantized, untouched
from triton_interpreter import DEVICE

from piecework.kernels import cache_format, reference
from piecework.kernels.attention import AttentionMetadata, GraphAttention, QuantizedAttention
from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.triton.attention import Blocks, TritonAttention

SMALL = Blocks(16, 16)
"""Tiles so small that short sequences have many."""


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool((actual.float().cpu() - expected).norm() <= tolerance * expected.norm())


@settings(max_examples=examples(6, exploring=8))
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 50)),
        min_size=1,
        max_size=4,
    ),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(2, 2), (6, 2), (4, 1)]),
    head_size=st.sampled_from([8, 24, 32]),
    window=st.sampled_from([None, 1, 5, 20, 100]),
    splits=st.sampled_from([1, 2, 8]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 5),
)
def test_it_equals_the_definition(
    lens: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    splits: int,
    padding: int,
    seed: int,
) -> None:
    step = Step(
        lens,
        page_size=page_size,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=head_size,
        seed=seed,
        device=DEVICE,
    )
    out = step.run(TritonAttention(blocks=SMALL, num_splits=splits), window=window, padding=padding)
    assert close(out, step.expected(window))
    keys, values = step.stored()
    assert torch.equal(keys, step.new(step.keys)) and torch.equal(values, step.new(step.values))


@settings(max_examples=5)
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.integers(0, 30)),
        min_size=1,
        max_size=3,
    ),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 5]),
    splits=st.sampled_from([1, 4]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sink=st.sampled_from([None, -1e4, 1.0, 1e4]),
    slope=st.sampled_from([None, 0.3]),
)
def test_soft_caps_sinks_and_slopes_are_plain_torch_s(
    lens: list[tuple[int, int]],
    group: int,
    window: int | None,
    splits: int,
    softcap: float | None,
    sink: float | None,
    slope: float | None,
) -> None:
    step = Step(
        lens, page_size=3, heads=2 * group, kv_heads=2, head_size=16, seed=len(lens), device=DEVICE
    )
    sinks = None if sink is None else sink + torch.arange(2 * group, device=DEVICE) / 4
    slopes = None if slope is None else slope / torch.arange(1, 2 * group + 1, device=DEVICE)
    step.heads = replace(step.heads, softcap=softcap, sinks=sinks, slopes=slopes)
    out = step.run(TritonAttention(blocks=SMALL, num_splits=splits), window=window)
    expected = step.run(TorchAttention(), window=window)
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(dtype, id=name, marks=[pytest.mark.slow] if name == "fp8_e5m2" else [])
        for name, dtype in CACHE_DTYPES.items()
    ],
)
@settings(max_examples=examples(2, exploring=4))
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.integers(0, 30)),
        min_size=1,
        max_size=3,
    ),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(2, 2), (6, 3), (4, 1)]),
    head_size=st.sampled_from([8, 26, 32]),
    window=st.sampled_from([None, 5]),
    splits=st.sampled_from([1, 4]),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 0.03)]),
)
def test_it_stores_and_reads_8_bits_as_the_reference_does(
    cache: torch.dtype,
    lens: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    splits: int,
    scales: tuple[float, float],
) -> None:
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_size": head_size}
    step, keys, values = quantized(
        Step(lens, page_size=page_size, **sizes, seed=1, device=DEVICE), cache, scales
    )
    wanted = [step.k_cache.clone(), step.v_cache.clone()]
    for tokens, part, scale in zip((step.keys, step.values), wanted, scales, strict=True):
        cache_format.store(step.new(tokens), part, step.metadata.slot_mapping, scale)
    out = step.run(TritonAttention(blocks=SMALL, num_splits=splits), window=window, padding=2)
    for found, part in zip((step.k_cache, step.v_cache), wanted, strict=True):
        assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))
    step.keys, step.values = keys, values
    assert close(out, step.expected(window))


@pytest.mark.parametrize(
    ("lens", "splits", "dtype"),
    [
        ([(20, 14), (1, 40), (3, 0)], 2, torch.float8_e4m3fn),
        ([(1, 60), (1, 5)], 1, torch.float8_e4m3fn),
        ([(1, 60), (1, 5)], 2, torch.float8_e4m3fn),
        ([(5, 30), (1, 40)], 2, torch.float8_e5m2),
    ],
)
def test_a_result_in_fp8_is_its_own_result_quantised(
    lens: list[tuple[int, int]], splits: int, dtype: torch.dtype
) -> None:
    """To the bit: in tiles, in one split, in several."""
    step = Step(lens, page_size=16, heads=4, seed=1, dtype=torch.float16, device=DEVICE)
    backend = TritonAttention(blocks=SMALL, num_splits=splits)
    assert isinstance(backend, QuantizedAttention)
    scale = torch.tensor([0.013], device=DEVICE)
    plain = step.run(backend)
    expected = reference.quantize_static(plain.flatten(1), scale, dtype).view(plain.shape)
    out = torch.empty_like(plain, dtype=dtype)
    tensors = (step.q, step.new(step.keys), step.new(step.values), out, scale)
    plan = backend.plan(step.metadata, step.page_size)
    backend.run_quantized(*tensors, step.k_cache, step.v_cache, plan, step.layout())
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_gpus_write_fp8_where_triton_s_attention_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_flashinfer, obstacle in (
        (False, None),
        (True, "attention by flashinfer writes 16 bits"),
    ):
        monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda found=has_flashinfer: found)
        assert cuda_platform.CudaPlatform().quantized_attention_obstacle() == obstacle


@pytest.mark.parametrize(
    ("lens", "dtype"),
    [
        ([(70, 30), (1, 90), (3, 0), (1, 0)], torch.float16),
        ([(1, 200), (1, 5)], torch.float32),
        pytest.param([(70, 30), (1, 90), (3, 0), (1, 0)], torch.float32, marks=pytest.mark.slow),
        pytest.param([(1, 200), (1, 5)], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_the_blocks_it_chooses_itself(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = Step(
        lens, page_size=16, heads=8, kv_heads=2, head_size=64, seed=3, dtype=dtype, device=DEVICE
    )
    assert close(
        step.run(TritonAttention()), step.expected(None), 1e-4 if dtype == torch.float32 else 1e-2
    )


def decode_out(
    step: Step, backend: GraphAttention, plan: object, places: int, window: int | None
) -> torch.Tensor:
    """A recorded step's: `places` queries, those behind the requests' own are whatever they are."""
    pad = torch.full(
        (places - len(step.q), 1, step.q.shape[2]), 7.0, dtype=step.q.dtype, device=DEVICE
    )
    q, k, v = (
        torch.cat([part, pad.expand(-1, part.shape[1], -1)])
        for part in (step.q, step.new(step.keys), step.new(step.values))
    )
    out = torch.full_like(q, float("nan"))
    backend.run(q, k, v, out, step.k_cache, step.v_cache, plan, step.layout(window))
    return out


@settings(max_examples=5)
@given(
    steps=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=4), min_size=1, max_size=3),
    spare=st.integers(0, 3),
    window=st.sampled_from([None, 7]),
    splits=st.sampled_from([1, 4]),
)
def test_one_plan_serves_steps_of_any_size_one_after_another(
    steps: list[list[int]], spare: int, window: int | None, splits: int
) -> None:
    backend = TritonAttention(blocks=SMALL, num_splits=splits)
    plan = backend.capture_plan(8, 24, 4, torch.device(DEVICE))
    tensors = [
        plan.slots,
        plan.block_table,
        plan.query_starts,
        plan.seq_lens,
        plan.rows,
        plan.requests,
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for number, pasts in enumerate(steps):
        step = Step([(1, past) for past in pasts], page_size=4, heads=4, seed=number, device=DEVICE)
        reserved = step.k_cache[0].clone()
        backend.update_plan(plan, step.metadata, len(pasts) + spare)
        out = decode_out(step, backend, plan, len(pasts) + spare, window)
        assert close(out[: len(pasts)], step.expected(window))
        assert not out[len(pasts) :].any(), "padding gives 0"
        assert torch.equal(step.stored()[0], step.new(step.keys))
        assert untouched(step.k_cache[0], reserved), "padding stores nothing"
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_a_plan_that_was_never_updated_describes_no_request() -> None:
    step = Step([(1, 9), (1, 3)], page_size=4, heads=4, seed=0, device=DEVICE)
    backend = TritonAttention(num_splits=2)
    before = step.k_cache.clone()
    out = decode_out(step, backend, backend.capture_plan(2, 4, 4, torch.device(DEVICE)), 2, None)
    assert not out.any() and untouched(step.k_cache, before)


def test_it_offers_plans_for_graphs() -> None:
    assert isinstance(TritonAttention(), GraphAttention)


def test_a_recorded_plan_refuses_what_it_cannot_hold() -> None:
    backend = TritonAttention()
    plan = backend.capture_plan(1, 2, 4, torch.device(DEVICE))
    for lens in ([(2, 0)], [(1, 1), (1, 1)], [(1, 20)]):
        metadata: AttentionMetadata = Step(
            lens, page_size=4, heads=2, seed=0, device=DEVICE
        ).metadata
        with pytest.raises(AssertionError):
            backend.update_plan(plan, metadata, 1)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("head_size", [80, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (8, 8)])
@pytest.mark.parametrize(
    "lens", [[(517, 300), (1, 900), (33, 0), (1, 0)], [(1, past) for past in range(1, 1200, 37)]]
)
def test_shapes_of_real_models(
    lens: list[tuple[int, int]], heads: tuple[int, int], head_size: int
) -> None:
    from piecework.kernels.paged_attention import TorchAttention

    step = Step(
        lens,
        page_size=16,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=head_size,
        seed=1,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    actual = step.run(TritonAttention(), padding=3)
    assert close(actual, step.run(TorchAttention(), padding=3).float().cpu(), 1e-2)
