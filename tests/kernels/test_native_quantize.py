"""Norms, activations, rotations and quantisation by the C++ kernels are the reference's, on every
variant of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants

from piecework.kernels import ops, reference
from piecework.kernels.cpu.native import quantize

DTYPES = (torch.int8, torch.float8_e4m3fn)
EPS = 1e-5


@pytest.fixture(params=native_variants(), ids=lambda variant: variant.name, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reference that must not be asked, so that it is the kernels that are tested."""
    library = built(request.param)
    monkeypatch.setattr(quantize, "load_kernels", lambda: library)
    monkeypatch.setattr(quantize, "reference", None)
    yield


def random(seed: int, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


def scheme(group: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The last arguments of an op: a static scale for no group."""
    return (group, dtype) if group else (torch.tensor([0.03]), dtype)


def results(name: str, given: str, module: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    made = getattr(module, f"{name}_{given}")(*arguments)
    return [made] if isinstance(made, torch.Tensor) else list(made)


CASES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@CASES
@given(
    tokens=st.integers(0, 40),
    groups=st.integers(1, 4),
    size=st.integers(1, 200),
    kind=st.sampled_from(["static", "token", "group"]),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-120, 120),
    seed=st.integers(0, 2**32 - 1),
)
@example(1, 1, 1, "token", torch.int8, 0, 0)
@example(300, 1, 576, "token", torch.int8, 0, 0)
def test_a_row_is_quantised_to_the_bit(
    tokens: int, groups: int, size: int, kind: str, dtype: torch.dtype, power: int, seed: int
) -> None:
    columns = groups * size
    group = {"static": 0, "token": columns, "group": size}[kind]
    # Rows of x may lie apart.
    x = (random(seed, tokens, columns + 3).float() * 2.0**power).bfloat16()[:, :columns]
    name = "static" if kind == "static" else "dynamic"
    arguments = (x, *scheme(group, dtype))
    found, expected = (
        results("quantize", name, module, arguments) for module in (quantize, reference)
    )
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_rounded_as_the_reference_does(dtype: torch.dtype) -> None:
    """All bfloat16 but what is no number."""
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite()][None]
    for scale in (torch.ones(1), torch.tensor([0.0371]), torch.tensor([3e30])):
        found = quantize.quantize_static(x, scale, dtype)
        assert torch.equal(found, reference.quantize_static(x, scale, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_group(dtype: torch.dtype, bad: float) -> None:
    x = random(0, 4, 256)
    numbers, scale = quantize.quantize_dynamic(x, 128, dtype)
    x[1, 7] = bad
    found, scales = quantize.quantize_dynamic(x, 128, dtype)
    assert not scales[1, 0].isfinite()
    others = torch.ones(4, 2, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(scales[others], scale[others])
    wide = others.repeat_interleave(128, 1)
    assert torch.equal(found.view(torch.uint8)[wide], numbers.view(torch.uint8)[wide])


def test_a_nan_is_one_in_e4m3_too() -> None:
    x = torch.tensor([[torch.nan, 1.0]]).bfloat16()
    found = quantize.quantize_static(x, torch.ones(1), torch.float8_e4m3fn).float()
    assert found[0, 0].isnan() and found[0, 1] == 1.0


def neighbours(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for few numbers, which are next to what they should be."""
    if found.numel() == 0:
        return found.shape == expected.shape
    one, two = found.float(), expected.float()
    step = 1.0 if found.dtype == torch.int8 else 0.0
    close = (one - two).abs() <= step + two.abs() * 0.13 + 2.0**-9
    return bool(close.all()) and (one != two).sum().item() <= 1 + 0.02 * found.numel()


Arguments = Callable[[int, int, int], tuple[torch.Tensor, ...]]
FUSED: dict[str, Arguments] = {
    "rms_norm_quantize": lambda seed, tokens, columns: (
        random(seed, tokens, columns + 5)[:, :columns],
        random(seed + 1, columns),
    ),
    "add_rms_norm_quantize": lambda seed, tokens, columns: (
        random(seed, tokens, columns),
        random(seed + 1, tokens, columns + 3)[:, :columns],
        random(seed + 2, columns),
    ),
    "silu_and_mul_quantize": lambda seed, tokens, columns: (
        random(seed, tokens, 2 * columns + 1)[:, : 2 * columns],
    ),
}


@pytest.mark.parametrize("name", FUSED)
@CASES
@given(
    tokens=st.integers(0, 40),
    groups=st.integers(1, 4),
    size=st.integers(1, 200),
    kind=st.sampled_from(["static", "token", "group"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_fused_op_is_its_parts_one_after_another(
    name: str, tokens: int, groups: int, size: int, kind: str, dtype: torch.dtype, seed: int
) -> None:
    columns = groups * size
    group = {"static": 0, "token": columns, "group": size}[kind]
    eps = () if name.startswith("silu") else (EPS,)
    arguments = (*FUSED[name](seed, tokens, columns), *eps, *scheme(group, dtype))
    given = "static" if kind == "static" else "dynamic"
    found, expected = (results(name, given, module, arguments) for module in (quantize, reference))
    assert neighbours(found[0], expected[0])
    for one, two in zip(found[1:], expected[1:], strict=True):
        if one.dtype == torch.bfloat16:
            assert torch.equal(one, two)
        else:
            assert torch.allclose(one, two, rtol=2.0**-7)


@pytest.mark.parametrize("name", FUSED)
@CASES
@given(tokens=st.integers(0, 40), columns=st.integers(1, 700), seed=st.integers(0, 2**32 - 1))
def test_without_quantising_the_rows_are_the_reference_s(
    name: str, tokens: int, columns: int, seed: int
) -> None:
    op = name.removesuffix("_quantize")
    eps = () if op == "silu_and_mul" else (EPS,)
    arguments = (*FUSED[name](seed, tokens, columns), *eps)
    made = [getattr(module, op)(*arguments) for module in (quantize, reference)]
    found, expected = ([each] if isinstance(each, torch.Tensor) else each for each in made)
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        assert torch.allclose(one.float(), two.float(), rtol=2.0**-6, atol=1e-30)
        assert (one != two).sum().item() <= 1 + 0.02 * one.numel()


@CASES
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 9),
    half=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_heads_are_rotated_to_the_bit(tokens: int, heads: int, half: int, seed: int) -> None:
    """Queries are a part of longer rows."""
    x = random(seed, tokens, heads + 2, 2 * half)[:, :heads]
    turns = [random(seed + i, tokens, 1, 2 * half) for i in (1, 2)]
    found, expected = (module.rotary_embedding(x, *turns) for module in (quantize, reference))
    assert torch.equal(found, expected)


@CASES
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_heads_are_normalised_and_rotated(
    tokens: int, heads: int, kv_heads: int, half: int, seed: int
) -> None:
    size = 2 * half
    # Queries and keys are parts of longer rows.
    qkv = random(seed, tokens, heads + 2 * kv_heads, size)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    weights = random(seed + 1, size), random(seed + 2, size)
    turns = random(seed + 3, tokens, 1, size), random(seed + 4, tokens, 1, size)
    found = quantize.norm_rotary_embedding(q, k, *weights, EPS, *turns)
    expected = reference.norm_rotary_embedding(q, k, *weights, EPS, *turns)
    assert found.shape == expected.shape
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-6, atol=0.2)
    assert (found != expected).sum().item() <= 1 + 0.02 * found.numel()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    x = random(0, 200, 2 * 576)
    before = torch.get_num_threads()
    expected = quantize.silu_and_mul_quantize_dynamic(x, 576, torch.int8)
    try:
        torch.set_num_threads(threads)
        found = quantize.silu_and_mul_quantize_dynamic(x, 576, torch.int8)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


UNKNOWN = [
    (torch.zeros(2, 8), 8, torch.int8),
    (torch.zeros(2, 8).bfloat16(), 8, torch.float8_e5m2),
    (torch.zeros(2, 2, 8).bfloat16(), 8, torch.int8),
    (torch.zeros(8, 2).bfloat16().t(), 8, torch.int8),
]


@pytest.mark.parametrize("arguments", UNKNOWN)
def test_what_the_kernels_do_not_know_goes_to_the_reference(
    arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "reference", reference)
    found, expected = (module.quantize_dynamic(*arguments) for module in (quantize, reference))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_the_cpu_has_them_once_its_attention_is_chosen() -> None:
    from piecework.kernels.cpu.platform import CpuPlatform

    CpuPlatform().make_attention_backend("native")
    assert ops.has_kernel("cpu", "silu_and_mul_quantize_dynamic")
    assert ops.has_kernel("cpu", "silu_and_mul")
    assert not ops.has_kernel("cpu", "silu_and_mul", torch.float32)
