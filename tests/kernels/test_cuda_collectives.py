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
from piecework.kernels.cuda import collectives
from piecework.kernels.cuda.collectives import CudaGroup
from piecework.kernels.fused_collectives import FusesNorms, Pipelines

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


def test_norms_bind_to_flashinfer_s_signature(
    group: CudaGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def fuse(given: dict[str, Any]) -> None:
        assert given["pattern"] == 1 and given["workspace"] == "workspace"
        normalised, total = reference.add_rms_norm(
            given["input"], given["residual_in"], given["rms_gamma"], given["rms_eps"]
        )
        given["norm_out"].copy_(normalised)
        given["residual_out"].copy_(total)

    def workspace(given: dict[str, Any]) -> str:
        made.append(given)
        return "workspace"

    library = SimpleNamespace(
        allreduce_fusion=bound("comm.allreduce_fusion", fuse),
        create_allreduce_fusion_workspace=bound(
            "comm.create_allreduce_fusion_workspace", workspace
        ),
    )
    monkeypatch.setattr(collectives, "_flashinfer", lambda: library)
    monkeypatch.setattr(collectives, "_has_flashinfer", lambda: True)
    assert isinstance(group, FusesNorms)
    x, residual, weight = (torch.randn(n, 16).bfloat16() for n in (3, 3, 1))
    for norm, *rest in (
        ("add_rms_norm", weight[0], 1e-5),
        ("add_rms_norm_quantize_static", weight[0], 1e-5, torch.tensor([0.1]), E4M3),
        ("add_rms_norm_quantize_dynamic", weight[0], 1e-5, 8, torch.int8),
    ):
        result = group.all_reduce_norm(norm, x, residual, *rest)
        expected = getattr(reference, norm)(x, residual, *rest)
        assert result is not None and len(result) == len(expected)
        assert all(
            torch.equal(one.float(), b.float()) for one, b in zip(result, expected, strict=True)
        )
    (asked,) = made
    assert asked["max_token_num"] * 16 * 2 == 16 << 20 and asked["hidden_dim"] == 16
    longer = torch.empty((16 << 20) // 32 + 1, 16, dtype=torch.bfloat16)
    for refused in (x.float(), longer):
        assert group.all_reduce_norm("add_rms_norm", refused, refused, weight[0], 1e-5) is None
