"""Pieces of a model captured as graphs on the simulated NPU give the answers of the CPU, and bugs
give others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_llama
from toy_llama import CapturedPieces, Step, ToyLlama

SIZES = [16, 4, 8]
STEPS = [
    ([0, 0], [9, 5]),
    ([9, 5], [1, 1]),
    ([10], [3]),
    ([13, 6], [1, 7]),
    ([120], [16]),
    ([136, 13], [1, 1]),
]
"""(tokens before, new tokens) of each request; sizes come in changing order, one request grows over
a page's end.
"""


class Machine:
    """A model and its cache on one device."""

    def __init__(self, device: str) -> None:
        toy_llama.define_attention()
        self.device = device
        self.model = ToyLlama().to(device)
        shape = (toy_llama.PAGES, toy_llama.PAGE_SIZE, toy_llama.HEADS_KV, toy_llama.HEAD_SIZE)
        generator = torch.Generator().manual_seed(1)
        random = [
            [torch.randn(shape, generator=generator) for _ in range(2)]
            for _ in range(toy_llama.LAYERS)
        ]
        self.caches = [(k.to(device), v.to(device)) for k, v in random]

    def step(self, before: list[int], new: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sets the step that attention reads; (ids, positions) on the host."""
        generator = torch.Generator().manual_seed(sum(before) * 31 + sum(new))
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, new, strict=True)])
        pages = torch.arange(1, 1 + 4 * len(new), dtype=torch.int32).view(len(new), 4)
        rows = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
        slots = (
            pages[rows, positions // toy_llama.PAGE_SIZE] * toy_llama.PAGE_SIZE
            + positions % toy_llama.PAGE_SIZE
        )
        toy_llama.Attention.step = Step(
            query_lens=new,
            seq_lens=[b + n for b, n in zip(before, new, strict=True)],
            slots=slots.to(torch.int32).to(self.device),
            pages=pages.to(self.device),
            caches=self.caches,
        )
        return torch.randint(toy_llama.VOCABULARY, (sum(new),), generator=generator), positions


def capture(
    npu: Machine, simnpu: Any, attend: toy_llama.Attend = toy_llama.attend_into_buffer
) -> CapturedPieces:
    # Pieces in between run attention once on what the capture left; its tokens go to page 0, which
    # no request has.
    npu.step([0], [1])
    assert toy_llama.Attention.step is not None
    toy_llama.Attention.step.slots.zero_()
    return CapturedPieces(npu.model, SIZES, simnpu.weak_ref_tensor, attend)


def expected(cpu: Machine, before: list[int], new: list[int]) -> torch.Tensor:
    hidden: torch.Tensor = cpu.model(*cpu.step(before, new))
    return hidden


def test_replay_at_three_sizes_equals_cpu(simnpu: Any) -> None:
    cpu, npu = Machine("cpu"), Machine("npu")
    pieces = capture(npu, simnpu)
    with simnpu.strict_addresses():
        for before, new in STEPS:
            want = expected(cpu, before, new)
            torch.testing.assert_close(
                pieces.run(*npu.step(before, new)).cpu(), want, rtol=0, atol=1e-5
            )
    for ours, theirs in zip(npu.caches, cpu.caches, strict=True):
        torch.testing.assert_close(ours[0][1:].cpu(), theirs[0][1:], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours[1][1:].cpu(), theirs[1][1:], rtol=0, atol=1e-5)


def test_eager_equals_cpu(simnpu: Any) -> None:
    cpu, npu = Machine("cpu"), Machine("npu")
    for before, new in STEPS:
        ids, positions = npu.step(before, new)
        hidden = npu.model(ids.npu(), positions.npu()).cpu()
        torch.testing.assert_close(hidden, expected(cpu, before, new), rtol=0, atol=1e-5)


def test_output_in_a_fresh_tensor_gives_wrong_answers(simnpu: Any) -> None:
    cpu, npu = Machine("cpu"), Machine("npu")
    pieces = capture(npu, simnpu, toy_llama.attend_into_fresh_tensor)
    for before, new in STEPS:
        want = expected(cpu, before, new)
        assert not torch.allclose(pieces.run(*npu.step(before, new)).cpu(), want, atol=1e-2)


def test_output_in_a_fresh_tensor_is_named_by_strict_addresses(simnpu: Any) -> None:
    npu = Machine("npu")
    pieces = capture(npu, simnpu, toy_llama.attend_into_fresh_tensor)
    with simnpu.strict_addresses(), pytest.raises(RuntimeError, match="freed after the capture"):
        pieces.run(*npu.step([0], [4]))


def test_output_of_one_size_is_overwritten_by_another(simnpu: Any) -> None:
    cpu, npu = Machine("cpu"), Machine("npu")
    pieces = capture(npu, simnpu)
    want = expected(cpu, [0], [4])
    kept = pieces.run(*npu.step([0], [4]))
    copied = kept.clone()
    pieces.run(*npu.step([0, 0], [9, 5]))
    torch.testing.assert_close(copied.cpu(), want, rtol=0, atol=1e-5)
    assert not torch.allclose(kept.cpu(), want, atol=1e-2)


def test_capture_order_and_sizes_share_memory(emptied_simnpu: Any) -> None:
    npu = Machine("npu")
    before = torch.npu.memory_reserved()
    capture(npu, emptied_simnpu)
    assert torch.npu.memory_reserved() - before <= 2 * 2**21, (
        "three sizes fit the largest one's memory"
    )


def test_dynamo_traces_the_model_once_for_all_sizes(simnpu: Any) -> None:
    cpu, npu = Machine("cpu"), Machine("npu")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph_module)
        simnpu.assert_no_cpu_fallback(graph_module)
        return graph_module.forward

    compiled = torch.compile(npu.model, backend=backend, fullgraph=True, dynamic=True)
    for before, new in STEPS[:3]:
        ids, positions = npu.step(before, new)
        hidden = compiled(ids.npu(), positions.npu()).cpu()
        torch.testing.assert_close(hidden, expected(cpu, before, new), rtol=0, atol=1e-5)
    (graph,) = graphs
    assert (
        sum("toy.attention" in str(node.target) for node in graph.graph.nodes) == toy_llama.LAYERS
    )
