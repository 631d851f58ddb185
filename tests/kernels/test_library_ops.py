"""Ops by sgl-kernel and flashinfer: over strict stand-ins everywhere, over the libraries themselves
where there is a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import library_ops_standin
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tried_here import TriedHere

pytest.importorskip("triton", reason="Triton is not installed")

from piecework.kernels import reference
from piecework.kernels.cuda import libraries
from piecework.kernels.cuda import ops as cuda_ops
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.cuda.libraries import LibraryOps
from piecework.kernels.cuda.ops import Libraries
from piecework.kernels.cuda.platform import CudaPlatform

LIBRARIES = st.sampled_from([library_ops_standin.sgl_kernel, library_ops_standin.flashinfer])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
SEEDS = st.integers(0, 1000)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the roundings that the definition has and the kernels have not."""
    assert actual.is_contiguous() and actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
@settings(max_examples=examples(20, exploring=40))
@given(
    make=LIBRARIES,
    seed=SEEDS,
    tokens=st.integers(0, 5),
    size=st.one_of(st.just(24), st.integers(2, 40)),
    gap=st.booleans(),
    dtype=DTYPES,
)
def test_an_op_is_the_definition_s_or_not_taken(
    op: str,
    make: Callable[[], LibraryOps],
    seed: int,
    tokens: int,
    size: int,
    gap: bool,
    dtype: torch.dtype,
) -> None:
    """Whatever the shape: the stand-ins raise where a kernel would go wrong."""
    columns = size if op == "rms_norm" else 2 * size
    x = random(seed, tokens, columns + 8 * gap, dtype=dtype)[:, :columns]
    others = (random(seed + 1, size, dtype=dtype), 1e-5) if op == "rms_norm" else ()
    before = x.clone()
    result = getattr(make(), op)(x, *others)
    assert torch.equal(x, before)
    if result is not None:
        assert_same(result, getattr(reference, op)(x, *others))
    assert (result is not None) == (
        tokens > 0 and size % 8 == 0 and x.is_contiguous() and dtype != torch.float32
    )


@settings(max_examples=examples(20, exploring=40))
@given(
    seed=SEEDS,
    tokens=st.integers(0, 3),
    heads=st.integers(1, 3),
    size=st.sampled_from([8, 12, 16, 32]),
    offset=st.integers(0, 2),
    dtype=DTYPES,
)
def test_heads_are_normalised_where_they_lie_by_flashinfer_alone(
    seed: int, tokens: int, heads: int, size: int, offset: int, dtype: torch.dtype
) -> None:
    """As queries and keys lie beside each other in what one product has made."""
    x, weight = (
        random(seed, tokens, heads + 3, size, dtype=dtype)[:, offset : offset + heads],
        random(seed + 1, size, dtype=dtype),
    )
    assert library_ops_standin.sgl_kernel().rms_norm(x, weight, 1e-6) is None
    result = library_ops_standin.flashinfer().rms_norm(x, weight, 1e-6)
    if result is not None:
        assert_same(result, reference.rms_norm(x, weight, 1e-6))
    assert (result is not None) == (tokens > 0 and size % 8 == 0 and dtype != torch.float32)


def test_memory_that_begins_between_vectors_is_not_taken() -> None:
    shifted = torch.empty(8 * 16 + 1, dtype=torch.bfloat16)[1:].view(8, 16)
    for library in (library_ops_standin.sgl_kernel(), library_ops_standin.flashinfer()):
        assert library.silu_and_mul(shifted) is None
        assert library.rms_norm(shifted, torch.ones(16, dtype=torch.bfloat16), 1e-5) is None
        assert library.rms_norm(torch.ones(8, 16, dtype=torch.bfloat16), shifted[0], 1e-5) is None


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Triton was asked for; the definition answers."""
    asked: list[str] = []
    for name in ("rms_norm", "silu_and_mul"):
        monkeypatch.setattr(
            cuda_ops.triton_ops,
            name,
            lambda *given, n=name: asked.append(n) or getattr(reference, n)(*given),
        )
    return asked


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def used(*found: LibraryOps) -> None:
        monkeypatch.setattr(
            libraries, "load", {library.name: library for library in found}.__getitem__
        )
        monkeypatch.setattr(cuda_ops, "_libraries", Libraries(found, TriedHere()))

    return used


X, WEIGHT = random(0, 6, 16, dtype=torch.bfloat16), random(1, 16, dtype=torch.bfloat16)
HEADS = random(2, 6, 4, 16, dtype=torch.bfloat16)[:, :2]


def test_the_first_library_that_takes_a_call_computes_it(
    use: Any, triton: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sgl, flashinfer = library_ops_standin.sgl_kernel(), library_ops_standin.flashinfer()
    use(sgl, flashinfer)
    assert_same(cuda_ops.rms_norm(X, WEIGHT, 1e-5), reference.rms_norm(X, WEIGHT, 1e-5))
    assert_same(cuda_ops.silu_and_mul(X), reference.silu_and_mul(X))
    # Each once to be tried, and once.
    assert (
        sgl.module.calls == ["rmsnorm"] * 2 + ["silu_and_mul"] * 2 and flashinfer.module.calls == []
    )
    for _ in range(2):
        assert_same(cuda_ops.rms_norm(HEADS, WEIGHT, 1e-5), reference.rms_norm(HEADS, WEIGHT, 1e-5))
    assert flashinfer.module.calls == ["rmsnorm"] * 3 and triton == []
    # Of the same op in another dtype the log has said enough.
    cuda_ops.silu_and_mul(X.half())
    wanted = [
        "sgl-kernel computes rms_norm",
        "sgl-kernel computes silu_and_mul",
        "flashinfer computes rms_norm",
    ]
    assert [record.getMessage() for record in caplog.records] == wanted
    cuda_ops.silu_and_mul(X.float())
    cuda_ops.silu_and_mul(X[:0])
    assert triton == ["silu_and_mul"] * 2 and len(sgl.module.calls) == 6


def test_a_trial_is_of_numbers_that_are_known(
    use: Any, triton: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that are not loaded yet are no fault of a library."""
    use(library_ops_standin.sgl_kernel())
    unset = torch.full_like(WEIGHT, float("nan"))
    assert bool(cuda_ops.rms_norm(X, unset, 1e-5).isnan().all())
    assert triton == [] and caplog.records == []


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def writes_nothing(x: torch.Tensor, *args: Any, out: torch.Tensor, **kwargs: Any) -> None:
    out.zero_()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(raises, "no kernel image is available for"), (writes_nothing, "off by 100.0%")],
)
def test_an_op_that_fails_its_trial_is_left_out_with_one_line(
    broken: Any, reason: str, use: Any, triton: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    use(
        LibraryOps(
            "sgl-kernel",
            SimpleNamespace(rmsnorm=broken, silu_and_mul=broken),
            takes_heads=False,
            functions=frozenset({"rmsnorm", "silu_and_mul"}),
        )
    )
    for _ in range(2):
        assert_same(cuda_ops.rms_norm(X, WEIGHT, 1e-5), reference.rms_norm(X, WEIGHT, 1e-5))
        cuda_ops.silu_and_mul(X)
    assert triton == ["rms_norm", "silu_and_mul"] * 2
    for record, op in zip(caplog.records, ["rms_norm", "silu_and_mul"], strict=True):
        line = record.getMessage()
        assert (
            record.levelno == logging.WARNING
            and reason in line
            and f"its {op} is not used" in line
            and "\n" not in line
        )


def test_nothing_is_tried_while_a_graph_is_recorded(
    use: Any, triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = library_ops_standin.flashinfer()
    use(library)
    with monkeypatch.context() as recording:
        recording.setattr(cuda_ops, "_recording", lambda device: True)
        cuda_ops.silu_and_mul(X)
    assert library.module.calls == [] and triton == ["silu_and_mul"]
    # What was tried before is recorded.
    cuda_ops.silu_and_mul(X)
    monkeypatch.setattr(cuda_ops, "_recording", lambda device: True)
    cuda_ops.silu_and_mul(X)
    assert len(library.module.calls) == 3 and triton == ["silu_and_mul"]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was imported before, and what the test imports."""
    libraries.load.cache_clear()
    before = {
        name: sys.modules.pop(name) for name in ("sgl_kernel", "flashinfer") if name in sys.modules
    }
    yield
    libraries.load.cache_clear()
    for name in ("sgl_kernel", "flashinfer"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("raise ImportError('could not load any common_ops library')", 1),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", 1),
        ("import no_such_dependency", 1),
        ("nothing_of_ours = print", 1),
        ("rmsnorm = print", 0),
        (None, 0),
    ],
)
def test_a_library_that_cannot_be_imported_leaves_triton_in_place(
    source: str | None,
    lines: int,
    use: Any,
    triton: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: Any,
) -> None:
    if source is not None:
        (tmp_path / "sgl_kernel.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "has_flashinfer", lambda: False)
    monkeypatch.setattr(cuda_ops, "_libraries", Libraries(None, TriedHere()))
    CudaPlatform()
    for _ in range(2):
        cuda_ops.silu_and_mul(X)
    assert triton == ["silu_and_mul"] * 2 and len(caplog.records) == lines


def test_of_a_long_error_the_line_has_both_ends() -> None:
    """sgl-kernel lists all it has tried, and why it failed at the end."""
    line = libraries.one_line(
        ImportError("could not load\n" + "somewhere " * 200 + "libnvrtc.so.12: cannot open")
    )
    assert (
        line.startswith("ImportError: could not load somewhere")
        and line.endswith("libnvrtc.so.12: cannot open")
        and len(line) < 350
    )


@pytest.mark.usefixtures("forgotten")
def test_what_is_installed_is_found_and_offered_for_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sgl_kernel", "flashinfer"):
        monkeypatch.setitem(
            sys.modules, name, library_ops_standin.LibraryStandIn(name, heads=name == "flashinfer")
        )
    for module in (libraries, cuda_platform):
        monkeypatch.setattr(module, "has_flashinfer", lambda: True)
    versions = CudaPlatform().op_versions()
    assert list(versions) == ["torch", "triton", "sgl-kernel", "flashinfer", "torch._scaled_mm"]
    assert versions["sgl-kernel"].rms_norm(HEADS, WEIGHT, 1e-5) is None
    assert versions["flashinfer"].rms_norm(HEADS, WEIGHT, 1e-5) is not None


@pytest.mark.usefixtures("forgotten")
def test_each_function_of_a_version_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang-kernel succeeds sgl-kernel under the same module, without products of blocks."""
    caplog.set_level(logging.INFO)
    module = library_ops_standin.LibraryStandIn("sglang_kernel", heads=False)
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    library = libraries.load("sgl-kernel")
    assert isinstance(library, LibraryOps)
    assert library.functions == {"rmsnorm", "silu_and_mul", "fp8_scaled_mm", "int8_scaled_mm"}
    assert "this version of sgl-kernel lacks fp8_blockwise_scaled_mm" in caplog.text


def test_an_op_has_the_shape_that_tracing_is_told() -> None:
    x, weight, angle = (
        torch.empty(*shape, device="meta", dtype=torch.bfloat16)
        for shape in ((5, 8), (8,), (5, 1, 4))
    )
    heads = torch.empty(5, 9, 4, device="meta")[:, :3]
    own = torch.ops.piecework
    assert own.rms_norm(x, weight, 1e-5).shape == (5, 8)
    assert [part.dtype for part in own.add_rms_norm(x, x, weight, 1e-5)] == [torch.bfloat16] * 2
    assert own.silu_and_mul(x).shape == (5, 4)
    assert own.rotary_embedding(heads, angle, angle).is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 37, 1000])
def test_shapes_of_an_8b_model_by_what_is_installed(tokens: int) -> None:
    """Eagerly, and replayed from a graph over other numbers."""
    if not libraries.installed():
        pytest.skip("neither sgl-kernel nor flashinfer is installed")
    CudaPlatform()
    x, gates, qkv = (
        random(i, tokens, *shape, dtype=torch.bfloat16).cuda()
        for i, shape in enumerate([(4096,), (28672,), (48, 128)])
    )
    weight, head_weight = (
        random(i, size, dtype=torch.bfloat16).cuda() for i, size in enumerate([4096, 128])
    )
    heads = qkv[:, 32:40]

    def work() -> list[torch.Tensor]:
        return [
            cuda_ops.rms_norm(x, weight, 1e-5),
            cuda_ops.rms_norm(heads, head_weight, 1e-5),
            cuda_ops.silu_and_mul(gates),
        ]

    def check(results: list[torch.Tensor]) -> None:
        expected = [
            reference.rms_norm(x, weight, 1e-5),
            reference.rms_norm(heads, head_weight, 1e-5),
            reference.silu_and_mul(gates),
        ]
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2**-6, atol=2e-2)

    check(work())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    for tensor in (x, gates, qkv):
        tensor.mul_(0.5)
    graph.replay()
    check(results)
