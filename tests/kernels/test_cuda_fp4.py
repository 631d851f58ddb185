"""flashinfer's calls for NVFP4 bind to its own signatures, and give what the definition does where
its kernels do.
"""

from __future__ import annotations

import inspect
from typing import Any

import flashinfer_standin
import pytest
import torch

from piecework.kernels import fp4, reference
from piecework.kernels.cuda import fp4 as cuda_fp4
from piecework.kernels.cuda import fp4_products, libraries, trials
from piecework.kernels.cuda.libraries import LibraryOps
from piecework.kernels.reference import silu_and_mul

HALVES = (torch.bfloat16, torch.float16)


class Flashinfer:
    """In plain torch, and as strict as its checks. `off`: what results are multiplied by."""

    def __init__(self, off: float = 1.0) -> None:
        self._off = off

    def __getattr__(self, name: str) -> Any:
        names: dict[str, Any] = {"torch": torch, "_UNSET": None}
        exec(f"def call({flashinfer_standin.EXTRACT['signatures'][name]}): pass", names)
        signature, run = inspect.signature(names["call"]), getattr(type(self), f"_{name}")

        def bound(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named)
            given.apply_defaults()
            return run(self, given.arguments)

        return bound

    def _fp4_quantize(self, given: dict[str, Any]) -> Any:
        x, factor = given["input"], given["global_scale"]
        assert x.dtype in HALVES and x.is_contiguous() and given["is_sf_swizzled_layout"] is False
        assert factor.shape == (1,) and factor.dtype == torch.float32
        numbers, scales = fp4.quantize_fp4(x, factor)
        return numbers, scales.view(torch.uint8)

    def _silu_and_mul_nvfp4_quantize(self, given: dict[str, Any]) -> Any:
        return self._fp4_quantize(given | {"input": silu_and_mul(given["input"])})

    def _block_scale_interleave(self, given: dict[str, Any]) -> torch.Tensor:
        assert given["unswizzled_sf"].dtype == torch.uint8
        return fp4.in_tiles(given["unswizzled_sf"].view(fp4.E4M3)).view(torch.uint8).flatten()

    def _mm_fp4(self, given: dict[str, Any]) -> torch.Tensor:
        a, b, alpha, dtype = (given[name] for name in ("a", "b", "alpha", "out_dtype"))
        assert a.dtype == b.dtype == torch.uint8 and a.shape[1] == b.shape[0]
        assert b.stride(0) == 1, "its columns are rows of the weight"
        assert alpha is None or (alpha.numel() == 1 and alpha.dtype == torch.float32)
        assert given["backend"] == "cutlass" and dtype in HALVES
        groups = a.shape[1] // 8
        scales = given["a_descale"], given["b_descale"].t()
        assert all(
            scale.dtype == torch.uint8 and scale.shape == fp4.tiled_shape(rows, groups)
            for scale, rows in zip(scales, (len(a), b.shape[1]), strict=True)
        )
        one = torch.ones(1) if alpha is None else alpha
        a_scales = fp4._out_of_tiles(scales[0], len(a), groups)
        by = scales[1].contiguous().view(fp4.E4M3)
        made = reference.fp4_linear(a, a_scales, b.t(), by, one, None, dtype)
        return made * self._off


def tensors(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(3, 128, generator=make).to(dtype),
        torch.randn(rows, 128, generator=make),
    )
    numbers, scales = fp4.quantize_fp4(weight, torch.tensor([700.0]))
    return x, torch.tensor([600.0]), numbers, fp4.in_tiles(scales)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_the_definition_s(by_rows: bool, has_bias: bool) -> None:
    x, factor, weight, scales = tensors(160)
    scale = torch.rand(160) / 4e5 if by_rows else torch.tensor([1 / 420_000])
    bias = torch.randn(160).bfloat16() if has_bias else None
    given = weight, scales, scale, bias, x.dtype
    wanted = reference.fp4_layer(x, factor, *given)
    found = fp4_products.multiply(
        Flashinfer(), *fp4_products.quantize(Flashinfer(), x, factor), *given
    )
    # A scale for each row, and a bias, are a rounding more.
    assert found.dtype == x.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
    assert by_rows or has_bias or torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("op", "fails"),
    [
        ("quantize_fp4", None),
        ("silu_and_mul_quantize_fp4", None),
        ("silu_and_mul_quantize_fp4", "no CuTe DSL"),
    ],
)
def test_quantisers_are_the_definition_s(
    monkeypatch: pytest.MonkeyPatch, op: str, fails: str | None
) -> None:
    monkeypatch.setattr(cuda_fp4, "_library", Flashinfer)
    monkeypatch.setattr(cuda_fp4, "trial_failure", lambda call: fails)
    x, factor, *_ = tensors(32)
    found = getattr(cuda_fp4, op)(x, factor)
    for one, other in zip(found, getattr(reference, op)(x, factor), strict=True):
        assert one.dtype == other.dtype and torch.equal(
            one.view(torch.uint8), other.view(torch.uint8)
        )


@pytest.mark.parametrize("call", ["fp4_layer", "fp4_gated_layer"])
@pytest.mark.parametrize("off", [1.0, 1.1])
def test_a_trial_compares_a_product(monkeypatch: pytest.MonkeyPatch, off: float, call: str) -> None:
    library = LibraryOps("flashinfer", Flashinfer(off), True, frozenset())
    monkeypatch.setattr(libraries, "load", lambda name: library)
    cpu = torch.device("cpu")

    class Here:
        def failure(self, request: dict[str, Any]) -> str | None:
            return trials.failure(request, cpu)

    monkeypatch.setattr(cuda_fp4, "TRIALS", Here())
    cuda_fp4.trial_failure.cache_clear()
    reason = None if off == 1.0 else f"{call} is off by 10.0%"
    assert cuda_fp4.trial_failure(call) == reason
    cuda_fp4.trial_failure.cache_clear()


@pytest.mark.parametrize(
    ("capability", "is_installed", "failure", "reason"),
    [
        ((10, 0), True, None, None),
        ((12, 0), True, None, None),
        ((9, 0), True, None, "compute capability 9.0 does not multiply 4 bits"),
        ((10, 0), False, None, "flashinfer is not installed"),
        ((10, 0), True, "it is off by 3%", "it is off by 3%"),
    ],
)
def test_it_says_why_activations_stay_in_16_bits(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    is_installed: bool,
    failure: str | None,
    reason: str | None,
) -> None:
    monkeypatch.setattr(cuda_fp4, "capability", lambda device: capability)
    monkeypatch.setattr(cuda_fp4, "has_library", lambda: is_installed)
    monkeypatch.setattr(cuda_fp4, "trial_failure", lambda call: failure)
    cuda_fp4.obstacle.cache_clear()
    assert cuda_fp4.obstacle(torch.device("cpu")) == reason
    cuda_fp4.obstacle.cache_clear()
