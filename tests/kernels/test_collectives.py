"""Collectives as ops: what a trace sees of them, and the group that computes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from piecework.kernels import collectives
from piecework.kernels.collectives import TENSOR_PARALLEL, CollectiveError, TorchGroup
from tests.thread_ranks import on_ranks, thread_ranks


def test_results_have_the_shapes_that_a_trace_is_told():
    with FakeTensorMode():
        x = torch.empty(6, 5, dtype=torch.bfloat16)
        reduced = torch.ops.piecework.all_reduce(x, TENSOR_PARALLEL)
        gathered = torch.ops.piecework.all_gather(x, TENSOR_PARALLEL, 3)
        scattered = torch.ops.piecework.reduce_scatter(x, TENSOR_PARALLEL, 3)
    assert [each.shape for each in (reduced, gathered, scattered)] == [(6, 5), (18, 5), (2, 5)]
    assert {each.dtype for each in (reduced, gathered, scattered)} == {torch.bfloat16}


def test_ops_go_to_the_group_of_their_name():
    def run(rank: int) -> tuple[torch.Tensor, ...]:
        x = torch.arange(4.0).view(4, 1) + 10 * rank
        return (
            collectives.all_reduce(x, TENSOR_PARALLEL),
            torch.ops.piecework.all_gather(x[:2], TENSOR_PARALLEL, 2),
            torch.ops.piecework.reduce_scatter(x, TENSOR_PARALLEL, 2),
        )

    with thread_ranks(2) as ranks:
        first, second = on_ranks(ranks, run)
    for reduced, gathered, _ in (first, second):
        assert reduced.flatten().tolist() == [10, 12, 14, 16]
        assert gathered.flatten().tolist() == [0, 1, 10, 11]
    assert first[2].flatten().tolist() == [10, 12]
    assert second[2].flatten().tolist() == [14, 16]


def test_a_group_that_was_not_set_is_named():
    with pytest.raises(KeyError, match="nobody"):
        collectives.all_reduce(torch.zeros(1), "nobody")


def test_a_rank_that_does_not_come_to_gloo_is_named():
    store: Any = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:

        def make(rank: int) -> TorchGroup:
            group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1))
            return TorchGroup(group, store, 1.0)

        groups = list(pool.map(make, range(2)))
        x = torch.ones(3)
        both = [pool.submit(group.all_reduce, x) for group in groups]
        assert [each.result().tolist() for each in both] == [[2.0] * 3] * 2
        line = r"all_reduce no\. 2, where rank 1 did not come within 1 s \(--dist-timeout\)"
        with pytest.raises(CollectiveError, match=line) as error:
            groups[0].all_reduce(x)
    assert error.value.missing == [1]
