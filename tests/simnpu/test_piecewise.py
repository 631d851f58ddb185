"""Our Llama on the simulated NPU: traced, cut, captured over several sizes, replayed with other
inputs, equal to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from piecework.compilation.cache import CompileCache
from piecework.compilation.capture import Graphs, Reason
from piecework.compilation.compiler import piece_compiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.recording import Recordable
from piecework.compilation.split import PieceCall, split
from piecework.compilation.torch_private import trace
from piecework.compilation.whole import BreakableForward
from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.npu.platform import NpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.platform.platform import Platform
from piecework.runtime.cache.pool import KVPool
from piecework.runtime.core.forward_context import ForwardContext, forward_context
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.loader.loader import empty_model, finish
from piecework.runtime.models.llama import LlamaConfig

SIZES = [4, 8, 16]
PAGES, PAGE_SIZE = 6, 16
CONFIG = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-5,
    max_position_embeddings=128,
    rope_theta=10000.0,
)
STEPS = [(0, 9), (9, 1), (10, 4), (14, 16), (30, 1), (31, 8), (39, 7)]
"""Tokens before and new tokens of the one request; sizes come in changing order."""


class Machine:
    """The model and its cache on one device."""

    def __init__(self, platform: Platform) -> None:
        self.platform, self.device = platform, torch.device(platform.device_type)
        register_attention(platform.dispatch_key)
        torch.manual_seed(0)
        self.model = empty_model(CONFIG, torch.float32, torch.device("cpu"))
        for parameter in self.model.parameters():
            parameter.normal_(0, 0.3)
        finish(self.model, None, progress=False)
        self.model.to(self.device)
        layouts = self.model.kv_layouts(torch.float32)
        self.pool = KVPool(layouts, num_pages=PAGES, page_size=PAGE_SIZE, platform=platform)

    def run(self, forward: Any, before: int, new: int) -> torch.Tensor:
        """Hidden states of new tokens, on the CPU; `forward` takes ids and positions on the
        device.
        """
        generator = torch.Generator().manual_seed(before)
        ids = torch.randint(CONFIG.vocab_size, (new,), generator=generator).to(self.device)
        positions = torch.arange(before, before + new)
        with self.context(positions + PAGE_SIZE, before + new):
            hidden: torch.Tensor = forward(ids, positions.to(self.device))
        return hidden.cpu()

    @contextmanager
    def context(self, slots: torch.Tensor, length: int) -> Iterator[None]:
        pages = torch.arange(1, PAGES)[None]
        metadata = AttentionMetadata(
            query_lens=[len(slots)],
            seq_lens=[length],
            block_table=pages.to(self.device),
            slot_mapping=slots.to(self.device),
        )
        backend = TorchAttention()
        plan = backend.plan(metadata, PAGE_SIZE)
        with forward_context(ForwardContext(backend=backend, plan=plan, pool=self.pool)):
            yield

    @contextmanager
    def dummy_step(self, size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
        with self.context(torch.arange(size) % PAGE_SIZE, size):
            ids = (torch.arange(size) + 13 * seed) % CONFIG.vocab_size
            yield [ids.to(self.device), torch.arange(size).to(self.device)]


@pytest.fixture
def npu(simnpu: Any) -> Machine:
    return Machine(NpuPlatform())


def in_pieces(npu: Machine, folder: Path) -> PiecewiseForward:
    maker = PieceMaker(
        platform=npu.platform,
        compiler=piece_compiler(None, npu.platform),
        cache=CompileCache(folder),
        max_tokens=128,
    )
    return maker.make(npu.model, [torch.arange(6, device="npu"), torch.arange(6, device="npu")])[0]


def captured(npu: Machine, forward: Recordable) -> Graphs:
    buffers = [torch.zeros(max(SIZES), dtype=torch.int64, device="npu") for _ in range(2)]
    npu.platform.padding_limit = 8.0
    graphs = Graphs(
        forward,
        npu.platform,
        buffers=buffers,
        sizes=SIZES,
        dummy_step=npu.dummy_step,
        eager=npu.model,
    )
    for size in graphs.pending():
        graphs.capture(size)
    return graphs


def replay(graphs: Graphs, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    size = graphs.choose(len(ids))
    assert size is not None
    hidden = graphs.replay(size, [ids, positions])
    assert hidden is not None
    return hidden


def check_every_step(npu: Machine, graphs: Graphs) -> None:
    cpu = Machine(CpuPlatform())
    for before, new in STEPS:
        want = cpu.run(cpu.model, before, new)
        have = npu.run(lambda *inputs: replay(graphs, *inputs), before, new)
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
    for ours, theirs in zip(npu.pool.k + npu.pool.v, cpu.pool.k + cpu.pool.v, strict=True):
        torch.testing.assert_close(ours[1:].cpu(), theirs[1:], rtol=0, atol=1e-4)


def test_pieces_at_three_sizes_equal_the_cpu(npu: Machine, simnpu: Any, tmp_path: Path) -> None:
    graphs = captured(npu, in_pieces(npu, tmp_path))
    assert graphs.captured == SIZES, graphs.stats.disabled
    assert graphs.stats.num_graphs == (CONFIG.num_layers + 1) * len(SIZES)
    with simnpu.strict_addresses():
        check_every_step(npu, graphs)


def test_a_breakable_capture_at_three_sizes_equals_the_cpu(npu: Machine, simnpu: Any) -> None:
    graphs = captured(npu, BreakableForward(npu.model))
    assert graphs.captured == SIZES, graphs.stats.disabled
    assert graphs.stats.num_graphs == (CONFIG.num_layers + 1) * len(SIZES)
    with simnpu.strict_addresses():
        check_every_step(npu, graphs)


def test_pieces_without_graphs_equal_the_cpu(npu: Machine, tmp_path: Path) -> None:
    cpu, pieces = Machine(CpuPlatform()), in_pieces(npu, tmp_path)
    for before, new in STEPS:
        torch.testing.assert_close(
            npu.run(pieces, before, new), cpu.run(cpu.model, before, new), rtol=0, atol=1e-4
        )


def test_no_op_of_a_piece_falls_to_the_cpu(npu: Machine, simnpu: Any) -> None:
    inputs = [torch.arange(6, device="npu"), torch.arange(6, device="npu")]
    calls = split(trace(npu.model.forward, inputs, 128), inputs).calls
    pieces = [call.graph for call in calls if isinstance(call, PieceCall)]
    assert len(pieces) == CONFIG.num_layers + 1
    for graph in pieces:
        simnpu.assert_no_cpu_fallback(fx.GraphModule(torch.nn.Module(), graph))


def test_out_of_graphs_disables_sizes_and_the_rest_is_right(
    npu: Machine, simnpu: Any, tmp_path: Path
) -> None:
    pieces = in_pieces(npu, tmp_path)
    with simnpu.limits(graph_limit=simnpu.live_graphs + 2 * (CONFIG.num_layers + 1)):
        graphs = captured(npu, pieces)
    assert graphs.captured == [8, 16]
    assert graphs.stats.disabled == {4: Reason.CAPTURE_FAILED}
    check_every_step(npu, graphs)


def test_a_size_without_memory_is_disabled_and_the_rest_is_right(
    emptied_simnpu: Any, npu: Machine, tmp_path: Path
) -> None:
    pieces = in_pieces(npu, tmp_path)
    with emptied_simnpu.limits(total_memory=torch.npu.memory_reserved()):
        graphs = captured(npu, pieces)
    assert Reason.OUT_OF_MEMORY in graphs.stats.disabled.values()
    for size in graphs.sizes:
        if size not in graphs.captured:
            graphs.capture(size)
    check_every_step(npu, graphs)
