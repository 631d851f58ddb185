"""Pools of graphs' memory refuse what torch's and torch_npu's allocators refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_captures import capture


def invalidated(pool: Any) -> Any:
    """A graph whose capture into `pool` was invalidated."""
    graph, x = torch.npu.NPUGraph(), torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="invalidated"), torch.npu.graph(graph, pool=pool):
        (x + 1).sum().item()
    torch.npu.set_stream(torch.npu.default_stream())
    return graph


def test_the_pool_of_an_invalidated_capture_keeps_recording(simnpu: Any) -> None:
    pool, x = torch.npu.graph_pool_handle(), torch.ones(4, device="npu")
    lost = invalidated(pool)
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        capture(lambda: x + 1, pool=pool)
    lost.reset()


def test_the_memory_of_an_invalidated_capture_comes_back_when_the_allocator_is_told(
    emptied_simnpu: Any,
) -> None:
    import torch_npu

    pool, before = torch.npu.graph_pool_handle(), torch.npu.memory_reserved()
    lost = invalidated(pool)
    lost.reset()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() > before
    torch_npu._C._npu_endAllocateToPool(0, pool)
    torch_npu._C._npu_releasePool(0, pool)
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before


def test_the_allocator_asks_the_graph_of_an_invalidated_capture_which_must_live(
    simnpu: Any,
) -> None:
    x = torch.ones(4, device="npu")
    lost = invalidated(torch.npu.graph_pool_handle())
    capture(lambda: x + 1)
    del lost
    with pytest.raises(RuntimeError, match="asks a graph that is gone"):
        capture(lambda: x + 1)


def test_a_pool_whose_graphs_are_all_gone_takes_no_other(simnpu: Any) -> None:
    pool, x = torch.npu.graph_pool_handle(), torch.ones(4, device="npu")
    first, second = capture(lambda: x + 1, pool=pool), capture(lambda: x + 2, pool=pool)
    first[0].reset()
    third = capture(lambda: x + 3, pool=pool)
    second[0].reset(), third[0].reset()
    with pytest.raises(RuntimeError, match="use_count > 0"):
        capture(lambda: x + 4, pool=pool)
