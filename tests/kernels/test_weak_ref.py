"""Weak references look into memory without keeping it: torch's own, and sgl-kernel's where that is
installed.
"""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecework.kernels.cuda.platform import CudaPlatform
from piecework.kernels.graph import weak_ref_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_it_is_the_same_memory_in_the_same_layout(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).to(dtype).view(4, 6)
    for view in (tensor, tensor[1:, 2:], tensor.t(), tensor[2], tensor[:0], tensor[0, 0]):
        weak = weak_ref_tensor(view)
        assert torch.equal(weak, view) and weak.stride() == view.stride() and weak.dtype == dtype
        weak += 1
        assert torch.equal(weak, view)


def test_it_does_not_keep_the_memory() -> None:
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor.untyped_storage())
    weak = weak_ref_tensor(tensor)
    del tensor
    assert gone() is None and weak.shape == (1000,)


def test_sgl_kernels_op_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    monkeypatch.setitem(
        sys.modules,
        "sgl_kernel",
        SimpleNamespace(weak_ref_tensor=lambda tensor: taken.append(tensor) or tensor),
    )
    tensor = torch.ones(2)
    assert CudaPlatform().weak_ref_tensor(tensor) is tensor and len(taken) == 1


class _Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("built for another GPU")


@pytest.mark.parametrize("module", [None, _Broken()], ids=["not installed", "broken"])
def test_without_it_torchs_own_is_taken(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    tensor = torch.ones(2)
    weak = CudaPlatform().weak_ref_tensor(tensor)
    assert weak is not tensor and weak.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("own", [True, False])
def test_memory_of_a_graphs_pool_is_given_to_the_next_capture(own: bool) -> None:
    platform, pool = CudaPlatform(), torch.cuda.graph_pool_handle()
    x = torch.ones(1 << 20, device="cuda")
    weak, graphs = [], []
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = x * (number + 2)
        weak.append(weak_ref_tensor(out) if own else platform.weak_ref_tensor(out))
        graphs.append(graph)
        del out
    assert weak[0].data_ptr() == weak[1].data_ptr()
    for number, graph in enumerate(graphs):
        graph.replay()
        assert float(weak[number][0]) == number + 2
