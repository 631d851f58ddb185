"""What is special about the C++ kernels of the layers' ops beside the contract: threads, and what
they leave to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_variants import built, native_variants

from piecework.kernels import ops, reference
from piecework.kernels.cpu.native import quantize


@pytest.fixture(params=native_variants(), ids=lambda variant: variant.name, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reference that must not be asked, so that it is the kernels that are tested."""
    library = built(request.param)
    monkeypatch.setattr(quantize, "load_kernels", lambda: library)
    monkeypatch.setattr(quantize, "reference", None)
    yield


def random(seed: int, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


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
