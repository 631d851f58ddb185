"""Graphs on the CPU keep the memory that they write to."""

from __future__ import annotations

import gc
import weakref

import torch

from piecework.kernels.cpu.graph import CpuGraph, CpuGraphPool


def test_a_graph_keeps_the_memory_of_a_pool_that_others_have_let_go_of() -> None:
    pool, graph, x = CpuGraphPool(), CpuGraph(), torch.ones(4)
    (output,) = graph.capture(lambda: [x + 1], pool, None)
    address, known = output.data_ptr(), weakref.ref(pool)
    del pool, output
    gc.collect()
    assert known() is not None, f"replays write to {address:#x}, which is free"
    graph.replay()
    del graph
    gc.collect()
    assert known() is None
