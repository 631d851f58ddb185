"""Products that meet a collective by torch_npu's kernels: what plain ops give, which compute where
a kernel refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simnpu_device import collectives as simulated

from piecework.kernels import collectives, fused_collectives
from piecework.kernels.npu import collectives as npu
from piecework.kernels.npu.refusals import refused
from tests.thread_ranks import ThreadRanks, on_ranks

RANKS = 2
OPS = {
    "all_gather_linear": "npu_all_gather_base_mm",
    "linear_reduce_scatter": "npu_mm_reduce_scatter_base",
    "linear_all_reduce": "npu_mm_all_reduce_base",
}


class NpuRanks(ThreadRanks):
    """Threads that multiply as `NpuGroup` does."""

    def multiply(self, op: str, x: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        return npu.multiply(op, self.size, lambda: "hccl", x, *rest)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[NpuRanks]:
    # Hardware's kernels take 16 bits and wide rows alone; the simulated ones take what is tested.
    monkeypatch.setattr(npu, "_HALVES", (torch.float32,))
    monkeypatch.setattr(npu, "_LEAST", 8)
    group = NpuRanks(RANKS)
    monkeypatch.setitem(simulated.GROUPS, "hccl", ThreadRanks(RANKS))
    collectives.set_group("own", group)
    simulated.launched.clear()
    yield group
    collectives.set_group("own", None)
    for op in OPS:
        refused.pop(op, None)


def results(ranks: NpuRanks, op: str, xs: list[torch.Tensor], ws: list[torch.Tensor]) -> list[Any]:
    more = () if op == "linear_all_reduce" else (RANKS,)
    call = getattr(fused_collectives.piecework, op)
    return on_ranks(
        ranks, lambda rank: call(xs[rank].npu(), ws[rank].npu(), None, "own", *more).cpu()
    )


def expected(op: str, xs: list[torch.Tensor], ws: list[torch.Tensor]) -> list[torch.Tensor]:
    if op == "all_gather_linear":
        return [F.linear(torch.cat(xs), weight) for weight in ws]
    total = sum(F.linear(x, weight) for x, weight in zip(xs, ws, strict=True))
    assert isinstance(total, torch.Tensor)
    return [total] * RANKS if op == "linear_all_reduce" else list(total.chunk(RANKS))


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_ranks_get_what_the_plain_ops_give(
    simnpu: Any, ranks: NpuRanks, monkeypatch: pytest.MonkeyPatch, op: str, refuses: bool
) -> None:
    if refuses:
        monkeypatch.setattr(simulated, "FLOATS", ())
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(4, 16, generator=generator) for _ in range(RANKS)]
    ws = [torch.randn(6, 16, generator=generator) for _ in range(RANKS)]
    for ours, wanted in zip(results(ranks, op, xs, ws), expected(op, xs, ws), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert simulated.launched == ([] if refuses else [OPS[op]] * RANKS)
    assert (op in refused) == refuses


def test_what_the_kernels_do_not_take_is_not_asked_of_them() -> None:
    x, weight = torch.zeros(4, 256, dtype=torch.bfloat16), torch.zeros(6, 256, dtype=torch.bfloat16)
    given = {
        "bias": (2, x, weight, torch.zeros(6)),
        "32 bits": (2, x.float(), weight.float(), None),
        "narrow": (2, x[:, :255], weight[:, :255], None),
        "empty": (2, x[:0], weight, None),
        "ranks": (3, x, weight, None),
    }
    for size, *rest in given.values():
        assert npu.multiply("linear_all_reduce", size, lambda: 1 / 0, *rest) is None  # type: ignore[arg-type, return-value]
    assert npu.multiply("all_gather_scaled_linear", 2, lambda: "", x) is None
