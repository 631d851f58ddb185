"""Quantised products by sgl-kernel and torch over strict stand-ins: what they take is what plain
torch gives, and all else is Triton's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import library_ops_standin
import products_standin
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tried_here import TriedHere

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.kernels import ops as piecework_ops
from piecework.kernels import reference
from piecework.kernels.cuda import libraries, products
from piecework.kernels.cuda import ops as cuda_ops
from piecework.kernels.cuda.ops import Libraries
from piecework.kernels.cuda.products import TorchProducts

FP8 = torch.float8_e4m3fn
FORMS = ("tensor", "static rows", "rows", "blocks", "row blocks")


def torch_products() -> TorchProducts:
    return TorchProducts(products_standin.scaled_mm)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(
    form: str,
    tokens: int = 3,
    columns: int = 256,
    size: int = 512,
    dtype: torch.dtype = FP8,
    out: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> tuple[Any, ...]:
    """A layer's, quantised as formats quantise them."""
    group = 128 if "blocks" in form else size
    x, x_scale = reference.quantize_dynamic(random(0, tokens, size), group, dtype)
    if form in ("tensor", "static rows"):
        x_scale = torch.tensor([0.02])
    shape = {
        "tensor": (1,),
        "blocks": (-(-columns // 128), -(-size // 128)),
        "row blocks": (columns, -(-size // 128)),
    }.get(form, (columns, 1))
    weight = (random(1, columns, size) * 30).to(dtype)
    bias = random(3, columns).to(out) if has_bias else None
    return x, x_scale, weight, random(2, *shape).abs() / 100, bias, out


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "capability", lambda device: (9, 0))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.usefixtures("hopper")
@settings(max_examples=examples(25, exploring=60))
@given(
    library=st.sampled_from([library_ops_standin.sgl_kernel, torch_products]),
    form=st.sampled_from(FORMS),
    tokens=st.integers(0, 5),
    columns=st.sampled_from([8, 24, 128, 200, 256]),
    size=st.sampled_from([16, 40, 128, 512, 640]),
    dtype=st.sampled_from([torch.int8, FP8]),
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    has_bias=st.booleans(),
)
def test_a_product_is_the_definition_s_or_not_taken(
    library: Callable[[], Any],
    form: str,
    tokens: int,
    columns: int,
    size: int,
    dtype: torch.dtype,
    out: torch.dtype,
    has_bias: bool,
) -> None:
    """Whatever the shape: the stand-ins raise where a kernel would refuse or go wrong."""
    if "blocks" in form and size % 128:
        size = 384
    call = arguments(form, tokens, columns, size, dtype, out, has_bias)
    one = library()
    result = one.scaled_linear(*call)
    assert (result is not None) == one.takes("scaled_linear", *call)
    if result is not None:
        assert_same(result, reference.scaled_linear(*call))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("library", "form", "dtype"),
    [
        *((library_ops_standin.sgl_kernel, form, FP8) for form in FORMS[:4]),
        *((library_ops_standin.sgl_kernel, form, torch.int8) for form in FORMS[:3]),
        *((torch_products, form, FP8) for form in FORMS[:4]),
    ],
)
def test_what_a_layer_asks_for_is_taken(library: Any, form: str, dtype: torch.dtype) -> None:
    one = library()
    for tokens in (1, 3):
        call = arguments(form, tokens, dtype=dtype, has_bias=form != "blocks")
        assert_same(one.scaled_linear(*call), reference.scaled_linear(*call))


@pytest.mark.parametrize(
    ("has", "taken"),
    [
        ((8, 0), {"sgl-kernel": {"int8"}, "torch": set()}),
        ((8, 9), {"sgl-kernel": {"int8", "rows"}, "torch": {"rows"}}),
        ((9, 0), {"sgl-kernel": {"int8", "rows", "blocks"}, "torch": {"rows", "blocks"}}),
        ((10, 0), {"sgl-kernel": {"rows"}, "torch": {"rows"}}),
    ],
)
def test_each_card_gets_what_there_are_kernels_for(
    has: tuple[int, int], taken: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "capability", lambda device: has)
    calls = {
        "int8": arguments("rows", dtype=torch.int8),
        "rows": arguments("rows"),
        "blocks": arguments("blocks"),
    }
    found = {
        "sgl-kernel": library_ops_standin.sgl_kernel(),
        "sglang-kernel": library_ops_standin.sglang_kernel(),
        "torch": torch_products(),
    }
    # The successor of sgl-kernel has no product of blocks, and keeps the others.
    expected = {**taken, "sglang-kernel": taken["sgl-kernel"] - {"blocks"}}
    for name, library in found.items():
        actual = {what for what, call in calls.items() if library.takes("scaled_linear", *call)}
        assert actual == expected[name], name


@pytest.mark.usefixtures("hopper")
def test_memory_with_gaps_or_between_vectors_is_not_taken() -> None:
    for library in (library_ops_standin.sgl_kernel(), torch_products()):
        x, x_scale, weight, *others = arguments("rows")
        gaps = torch.cat((x.view(torch.int8),) * 2, 1).view(FP8)[:, : x.shape[1]]
        shifted = torch.empty(weight.numel() + 8, dtype=FP8)[8:].view(weight.shape)
        assert library.scaled_linear(gaps, x_scale, weight, *others) is None
        assert library.scaled_linear(x, x_scale, shifted, *others) is None


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Triton was asked for; the definition answers."""
    asked: list[str] = []

    def answer(*given: Any) -> torch.Tensor:
        asked.append("scaled_linear")
        return reference.scaled_linear(*given)

    monkeypatch.setattr(cuda_ops.triton_ops, "scaled_linear", answer)
    return asked


def use(monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
    monkeypatch.setattr(libraries, "load", {one.name: one for one in found}.__getitem__)
    monkeypatch.setattr(cuda_ops, "_libraries", Libraries(found, TriedHere()))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("form", FORMS[:4])
def test_a_product_is_tried_with_few_rows_and_many_before_it_is_used(
    form: str, triton: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rows: list[int] = []

    def multiply(*given: Any, **named: Any) -> torch.Tensor:
        rows.append(len(given[0]))
        return products_standin.scaled_mm(*given, **named)

    use(monkeypatch, TorchProducts(multiply))
    for tokens in (1, 5, 1):
        call = arguments(form, tokens)
        assert_same(cuda_ops.scaled_linear(*call), reference.scaled_linear(*call))
    assert rows == [160, 1, 3, 1, 5, 1] and triton == []
    assert [record.getMessage() for record in caplog.records] == [
        "torch._scaled_mm computes scaled_linear"
    ]


def refuses(*given: Any, **named: Any) -> Any:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def forgets_the_scale(x: torch.Tensor, weight: torch.Tensor, *scales: Any, **named: Any) -> Any:
    return (x.float() @ weight.float()).to(named["out_dtype"])


def is_wrong_for_one_row(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    result = products_standin.scaled_mm(x, *given, **named)
    return result * 0 if len(x) == 1 else result


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (refuses, "CUBLAS_STATUS_NOT_SUPPORTED"),
        (forgets_the_scale, "scaled_linear is off by"),
        (is_wrong_for_one_row, "scaled_linear is off by 100.0%"),
    ],
)
def test_a_product_that_fails_its_trial_is_triton_s_with_one_line(
    broken: Any,
    reason: str,
    triton: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(monkeypatch, TorchProducts(broken))
    call = arguments("rows")
    for _ in range(2):
        assert_same(cuda_ops.scaled_linear(*call), reference.scaled_linear(*call))
    assert triton == ["scaled_linear"] * 2
    (record,) = caplog.records
    assert (
        reason in record.getMessage()
        and "its scaled_linear by rows is not used" in record.getMessage()
    )


@pytest.mark.usefixtures("hopper")
def test_a_form_that_fails_leaves_the_others(
    triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses_rows(*given: Any, **named: Any) -> torch.Tensor:
        if given[2].dim() == 2 and given[2].shape[1] == 1:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return products_standin.scaled_mm(*given, **named)

    use(monkeypatch, TorchProducts(refuses_rows))
    for form in ("rows", "blocks", "tensor"):
        call = arguments(form)
        assert_same(cuda_ops.scaled_linear(*call), reference.scaled_linear(*call))
    assert triton == ["scaled_linear"]


@pytest.mark.usefixtures("hopper")
def test_what_no_library_takes_is_triton_s(
    triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, library_ops_standin.sgl_kernel(), torch_products())
    call = arguments("row blocks")
    assert_same(cuda_ops.scaled_linear(*call), reference.scaled_linear(*call))
    assert triton == ["scaled_linear"]


def test_torch_s_schema_is_the_one_that_is_called() -> None:
    """Of 2.11 and 2.13 alike: torchgen/packaged/ATen/native/native_functions.yaml in the wheels."""
    schema = torch.ops.aten._scaled_mm.default._schema
    assert str(schema) == (
        "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, "
        "Tensor? bias=None, Tensor? scale_result=None, ScalarType? out_dtype=None, "
        "bool use_fast_accum=False) -> Tensor"
    )


def test_each_quantised_op_has_a_kernel_on_gpus() -> None:
    own = set(piecework_ops.TRACED) - {"rms_norm", "silu_and_mul", "scaled_linear"}
    # tests/kernels/test_cuda_fp4.py
    for op in (op for op in own if "fp4" not in op):
        assert getattr(cuda_ops, op) is getattr(cuda_ops.triton_ops, op)
