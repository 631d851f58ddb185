"""The calls of torch's symmetric memory and of flashinfer bind to their own signatures, and what
they are not made for is left to nccl.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import flashinfer_standin
import pytest
import torch
import torch.distributed as dist

from piecework.kernels import reference
from piecework.kernels.collectives import set_group
from piecework.kernels.cuda import collectives, fused_norms
from piecework.kernels.cuda.collectives import CudaGroup
from piecework.kernels.fused_collectives import NORMS, FusesNorms, Pipelines

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def group() -> Iterator[CudaGroup]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    collectives._with_symmetric_memory.cache_clear()
    yield CudaGroup(dist.group.WORLD, store, 10.0)
    dist.destroy_process_group()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scales(rows: int, columns: int) -> list[torch.Tensor]:
    return [meta(*shape, dtype=torch.float32) for shape in ((rows, 1), (columns, 1))]


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
def test_products_bind_to_torch_s_own_ops(group: CudaGroup, op: str) -> None:
    assert isinstance(group, Pipelines)
    made = group.multiply(op, meta(32, 16), meta(48, 16), None)
    assert made is not None and made.shape == (32, 48) and made.dtype == torch.bfloat16
    x, weight = meta(32, 16, dtype=E4M3), meta(48, 16, dtype=E4M3)
    scaled = op.replace("linear", "scaled_linear")
    one = meta(1, dtype=torch.float32)
    for x_scale, weight_scale in (scales(32, 48), [one, one]):
        made = group.multiply(scaled, x, x_scale, weight, weight_scale, None, torch.bfloat16)
        assert made is not None and made.shape == (32, 48) and made.dtype == torch.bfloat16


def test_products_of_other_kinds_are_left(group: CudaGroup) -> None:
    x, weight, (x_scale, weight_scale) = meta(32, 16), meta(48, 16), scales(32, 48)
    for rest in ((weight, meta(48)), (weight.float(), None)):
        assert group.multiply("all_gather_linear", x, *rest) is None
    for dtype, by in ((torch.int8, x_scale), (E4M3, meta(32, 2, dtype=torch.float32))):
        given = (x.to(dtype), by, weight.to(dtype), weight_scale, None, torch.bfloat16)
        assert group.multiply("all_gather_scaled_linear", *given) is None


def bound(name: str, run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(f"def call({flashinfer_standin.EXTRACT['signatures'][name]}): pass", names)
    signature = inspect.signature(names["call"])
    return lambda *args, **named: run(signature.bind(*args, **named).arguments)


class Flashinfer:
    """`flashinfer.comm` in plain torch, for one rank, by its own signatures."""

    def __init__(self, fails: bool = False) -> None:
        self.made: list[dict[str, Any]] = []
        self.patterns: list[int] = []
        self.destroyed = 0
        self.allreduce_fusion = bound("comm.allreduce_fusion", self._fuse)
        self.create_allreduce_fusion_workspace = bound(
            "comm.create_allreduce_fusion_workspace", self._workspace
        )
        self._fails = fails

    def _fuse(self, given: dict[str, Any]) -> None:
        if self._fails:
            raise RuntimeError("no kernel image is available")
        self.patterns.append(given["pattern"])
        normalised, total = reference.add_rms_norm(
            given["input"], given["residual_in"], given["rms_gamma"], given["rms_eps"]
        )
        given["residual_out"].copy_(total)
        if given["pattern"] == 1:
            given["norm_out"].copy_(normalised)
            return
        assert "norm_out" not in given
        if given["pattern"] == 3:
            assert given["layout_code"] == 2 and given["scale_factor"].shape == (1,)
            numbers, scales = reference.quantize_fp4(normalised, given["scale_factor"])
            given["quant_out"].copy_(numbers)
            given["scale_out"].view(torch.uint8).copy_(scales.view(torch.uint8))
            return
        assert given["quant_out"].dtype == E4M3
        if given["pattern"] == 2:
            assert given["scale_factor"].shape == (1,)
            made = reference.quantize_static(normalised, given["scale_factor"], E4M3)
        else:
            made, scales = reference.quantize_dynamic(normalised, normalised.shape[1], E4M3)
            given["scale_out"].copy_(scales)
        given["quant_out"].copy_(made)

    def _workspace(self, given: dict[str, Any]) -> Any:
        self.made.append(given)
        return SimpleNamespace(destroy=self._destroy)

    def _destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Flashinfer], Flashinfer]:
    def used(library: Flashinfer) -> Flashinfer:
        monkeypatch.setattr(fused_norms, "_flashinfer", lambda: library)
        monkeypatch.setattr(fused_norms, "has_library", lambda: True)
        monkeypatch.setattr(fused_norms, "capability", lambda device: (9, 0))
        monkeypatch.setattr(fused_norms, "_SIZES", (1, 2))
        return library

    return used


X, RESIDUAL, WEIGHT = (torch.randn(n, 16).bfloat16() for n in (3, 3, 1))
GIVEN = X, RESIDUAL, WEIGHT[0], 1e-5


def test_norms_bind_to_flashinfer_s_signature(group: CudaGroup, use: Any) -> None:
    library = use(Flashinfer())
    assert isinstance(group, FusesNorms)
    for norm, *how in (
        ("add_rms_norm",),
        ("add_rms_norm_quantize_static", torch.tensor([0.1]), E4M3),
        ("add_rms_norm_quantize_dynamic", 16, E4M3),
        ("add_rms_norm_quantize_dynamic", 8, E4M3),
        ("add_rms_norm_quantize_dynamic", 8, torch.int8),
    ):
        result = group.all_reduce_norm(norm, *GIVEN, *how)
        expected = getattr(reference, norm)(*GIVEN, *how)
        assert result is not None and len(result) == len(expected)
        assert all(
            torch.equal(one.float(), b.float()) for one, b in zip(result, expected, strict=True)
        )
    # Each kind is tried once before it is used.
    assert library.patterns == [1, 1, 2, 2, 10, 10, 1, 1]
    (asked,) = library.made
    assert asked["max_token_num"] * 16 * 2 == 16 << 20 and asked["hidden_dim"] == 16


@pytest.mark.parametrize(("major", "patterns"), [(10, [3, 3]), (12, [3, 3]), (9, [1, 1])])
def test_four_bits_are_flashinfer_s_where_a_gpu_converts_to_them(
    group: CudaGroup,
    use: Any,
    monkeypatch: pytest.MonkeyPatch,
    major: int,
    patterns: list[int],
) -> None:
    """Elsewhere the norm is flashinfer's, and its result is quantised by an op of its own."""
    library = use(Flashinfer())
    monkeypatch.setattr(fused_norms, "capability", lambda device: (major, 0))
    norm, factor = "add_rms_norm_quantize_fp4", torch.tensor([500.0])
    assert norm in NORMS
    result = group.all_reduce_norm(norm, *GIVEN, factor)
    expected = getattr(reference, norm)(*GIVEN, factor)
    assert result is not None and library.patterns == patterns
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_library": lambda: False}, "flashinfer is not installed"),
        ({"capability": lambda device: (8, 9)}, "no kernel for compute capability 8.9"),
        ({"_SIZES": (2, 4)}, "flashinfer has kernels for 2, 4 ranks, not 1"),
    ],
)
def test_a_machine_without_these_kernels_computes_the_parts(
    change: dict[str, Any],
    reason: str,
    group: CudaGroup,
    use: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = use(Flashinfer())
    for name, value in change.items():
        monkeypatch.setattr(fused_norms, name, value)
    assert group.all_reduce_norm("add_rms_norm", *GIVEN) is None and library.made == []
    assert reason in str(fused_norms.obstacle(1, X.device))


def test_other_tensors_are_left(group: CudaGroup, use: Any) -> None:
    use(Flashinfer())
    longer = torch.empty((16 << 20) // 32 + 1, 16, dtype=torch.bfloat16)
    narrow = torch.empty(3, 12, dtype=torch.bfloat16)
    for refused in (X.float(), longer, narrow, X[:0]):
        weight = torch.ones(refused.shape[1], dtype=refused.dtype)
        assert group.all_reduce_norm("add_rms_norm", refused, refused, weight, 1e-5) is None


def test_kernels_that_fail_are_left_by_every_rank_with_one_line(
    group: CudaGroup, use: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use(Flashinfer(fails=True))
    for _ in range(2):
        assert group.all_reduce_norm("add_rms_norm", *GIVEN) is None
    (record,) = caplog.records
    assert "nccl's is: RuntimeError: no kernel image is available" in record.getMessage()


def test_kernels_that_fail_on_another_rank_are_left(
    group: CudaGroup, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = use(Flashinfer())
    monkeypatch.setattr(group, "_all", lambda mine: False)
    assert group.all_reduce_norm("add_rms_norm", *GIVEN) is None and library.patterns == [1]


def test_nothing_is_tried_while_a_graph_is_recorded(
    group: CudaGroup, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = use(Flashinfer())
    monkeypatch.setattr(fused_norms, "_is_capturing", lambda device: True)
    assert group.all_reduce_norm("add_rms_norm", *GIVEN) is None and library.patterns == []


def test_a_group_that_is_removed_destroys_its_workspaces(group: CudaGroup, use: Any) -> None:
    library = use(Flashinfer())
    set_group("own", group)
    group.all_reduce_norm("add_rms_norm", *GIVEN)
    assert library.destroyed == 0
    set_group("own", None)
    assert library.destroyed == len(library.made) == 1
    assert group.all_reduce_norm("add_rms_norm", *GIVEN) is not None and len(library.made) == 2
