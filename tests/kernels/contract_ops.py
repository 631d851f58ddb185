"""What every implementation of the layers' ops must give: the numbers of `kernels.reference`. A
test file imports these tests and defines the fixture `kind`, as for `contract_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels import reference

EPS = 1e-5
# An op rounds a number to its dtype before its last product and after. A sum in another order may
# change the first rounding, and then a few results differ by up to three of the last digits.
ROUNDINGS = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-6}
# Distance of two neighbours in an 8-bit format: a number, and a share of their size.
STEPS = {
    torch.int8: (1.0, 0.0),
    torch.float8_e4m3fn: (2**-9, 0.13),
    torch.float8_e5m2: (2**-16, 0.26),
}
PLAIN = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding", "norm_rotary_embedding")
FUSED = ("rms_norm_quantize", "add_rms_norm_quantize", "silu_and_mul_quantize")


SIZES = st.integers(1, 200)


@dataclass(frozen=True)
class Kind:
    """An implementation.

    Attributes:
        call: Calls the op of a name with its arguments.
        dtypes: dtypes of inputs.
        quantized: dtypes that it quantises to.
        exact: Ops whose results have the same bits as the reference's.
        differ: The largest shares that may differ at all, of plain and of quantised results.
        slack: What an 8-bit number may be off by beside one step, as a share of the largest.
        sizes: Sizes of a head, of a group, or of a row.
    """

    name: str
    call: Callable[..., Any]
    device: str = "cpu"
    examples: int = 20
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    quantized: Sequence[torch.dtype] = tuple(reference.LARGEST)
    exact: Sequence[str] = ("quantize",)
    differ: tuple[float, float] = (1.0, 0.1)
    slack: float = 0.0
    sizes: st.SearchStrategy[int] = SIZES

    def results(self, op: str, *arguments: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each result beside the reference's. Inputs must stay as they are."""
        given = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=self.device).copy_(a)
            if torch.is_tensor(a)
            else a
            for a in arguments
        ]
        found, expected = self.call(op, *given), getattr(reference, op)(*arguments)
        for one, other in zip(given, arguments, strict=True):
            if torch.is_tensor(one):
                assert torch.equal(one.cpu().nan_to_num(), other.nan_to_num())
        several = [(each,) if torch.is_tensor(each) else each for each in (found, expected)]
        pairs = list(zip(*several, strict=True))
        for one, other in pairs:
            assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
        return [(one.cpu(), other) for one, other in pairs]

    def each(self, check: Callable[..., None], **strategies: Any) -> None:
        settings(max_examples=self.examples)(given(**strategies)(check))()


def assert_few_differ(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    assert (found != expected).sum().item() <= 1 + share * found.numel()


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def inputs(op: str, seed: int, tokens: int, size: int, heads: int, dtype: torch.dtype) -> list[Any]:
    """Return tensors whose rows do not lie one behind the other where an op allows that."""
    columns = max(2, size * heads)
    x = random(seed, tokens, columns + 3, dtype=dtype)[:, :columns]
    residual = random(seed + 1, tokens, columns, dtype=dtype)
    weight = random(seed + 2, columns, dtype=dtype)
    gates = random(seed, tokens, 2 * columns, dtype=dtype)
    # Queries and keys lie beside each other in what one product has made.
    parts = random(seed, tokens, heads + 4, 2 * size, dtype=dtype)
    q, k = parts[:, :heads], parts[:, heads : heads + 2]
    head_weights = [random(seed + i, 2 * size, dtype=dtype) for i in (3, 4)]
    angles = random(seed + 5, tokens, 1, size, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    turns = [torch.cat(halves, -1).to(dtype) for halves in ((cos, cos), (-sin, sin))]
    return {
        "rms_norm": [x, weight, EPS],
        "add_rms_norm": [x, residual, weight, EPS],
        "silu_and_mul": [gates],
        "rotary_embedding": [q, *turns],
        "norm_rotary_embedding": [q, k, *head_weights, EPS, *turns],
    }[op.removesuffix("_quantize")]


@pytest.mark.parametrize("op", PLAIN)
def test_ops_give_the_references_numbers(kind: Kind, op: str) -> None:
    def check(seed: int, tokens: int, size: int, heads: int, dtype: torch.dtype) -> None:
        for one, other in kind.results(op, *inputs(op, seed, tokens, size, heads, dtype)):
            if op in kind.exact:
                assert torch.equal(one, other)
            largest = float(other.abs().max()) if other.numel() else 0.0
            digits = ROUNDINGS[dtype]
            atol = digits * largest if "rotary" in op else 1e-3
            torch.testing.assert_close(one, other, rtol=digits, atol=atol)
            assert_few_differ(one, other, kind.differ[0])

    kind.each(
        check,
        seed=st.integers(0, 1000),
        tokens=st.integers(0, 9),
        size=kind.sizes,
        heads=st.integers(1, 5),
        dtype=st.sampled_from(kind.dtypes),
    )


@pytest.mark.parametrize("op", ["quantize", *FUSED])
def test_results_are_quantised_as_by_the_reference(kind: Kind, op: str) -> None:
    """By a static scale, by a scale for each row, and by one for each group of a row."""

    def check(
        seed: int,
        tokens: int,
        groups: int,
        size: int,
        scheme: str,
        power: int,
        dtype: torch.dtype,
        quantized: torch.dtype,
    ) -> None:
        columns = groups * max(2, size)
        if op == "quantize":
            x = random(seed, tokens, columns + 3, dtype=torch.float32) * 2.0**power
            arguments: list[Any] = [x.to(dtype)[:, :columns]]
        else:
            arguments = inputs(op, seed, tokens, size, groups, dtype)
        if scheme == "static":
            last: list[Any] = [torch.tensor([0.03]), quantized]
        else:
            last = [columns if scheme == "row" else columns // groups, quantized]
        name = f"{op}_{'static' if scheme == 'static' else 'dynamic'}"
        for one, other in kind.results(name, *arguments, *last):
            if op in kind.exact:
                assert torch.equal(one, other)
            elif one.dtype == dtype != torch.float32:
                assert torch.equal(one, other), "sums are exact"
            elif one.dtype == quantized:
                step, share = STEPS[quantized]
                wide = other.float()
                slack = kind.slack * reference.LARGEST[quantized]
                off = (one.float() - wide).abs()
                assert (off <= step + share * wide.abs() + slack).all()
                assert_few_differ(one.float(), wide, kind.differ[1])
            else:
                torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)

    kind.each(
        check,
        seed=st.integers(0, 1000),
        tokens=st.integers(0, 40 if kind.examples > 15 else 3),
        groups=st.integers(1, 4),
        size=kind.sizes,
        scheme=st.sampled_from(["static", "row", "group"]),
        power=st.integers(-10, 10),
        dtype=st.sampled_from(kind.dtypes),
        quantized=st.sampled_from(kind.quantized),
    )


def test_every_number_is_rounded_as_by_the_reference(kind: Kind) -> None:
    """All numbers of 16 bits, infinities too."""
    if "quantize" not in kind.exact:
        pytest.skip("the lowest number of int8 is -128")
    for dtype in kind.dtypes:
        if dtype.itemsize != 2:
            continue
        x = torch.arange(2**16).to(torch.uint16).view(dtype)
        x = x[~x.isnan()][None]
        for quantized in kind.quantized:
            for scale in (1.0, 0.0371, 2.0**100):
                given_by = x, torch.tensor([scale]), quantized
                ((one, other),) = kind.results("quantize_static", *given_by)
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_in_its_group(kind: Kind, bad: float) -> None:
    for quantized in kind.quantized:
        x = random(0, 4, 256, dtype=kind.dtypes[0])
        ((numbers, _), (scale, _)) = kind.results("quantize_dynamic", x, 128, quantized)
        x[1, 7] = bad
        made = kind.call("quantize_dynamic", x.to(kind.device), 128, quantized)
        found, scales = (each.cpu() for each in made)
        others = torch.ones(4, 2, dtype=torch.bool)
        others[1, 0] = False
        assert torch.equal(scales[others], scale[others])
        wide = others.repeat_interleave(128, 1)
        assert torch.equal(found.view(torch.uint8)[wide], numbers.view(torch.uint8)[wide])
        broken = found.float()[1, :128] * scales[1, 0]
        assert not broken.isfinite().all()
        if quantized.is_floating_point and bad != bad:
            made = kind.call(
                "quantize_static", x.to(kind.device), torch.ones(1).to(kind.device), quantized
            )
            assert made.cpu().float().isnan().nonzero().tolist() == [[1, 7]]
