"""Updates of a captured graph's lengths: before its replay or while it runs, in the right order of
streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch


def capture(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """(graph, what the function returned)."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = function()
    return graph, result


class Decode:
    """Two requests' decode attention, captured with auto_dispatch_capture, and its reference."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, 6, 16, 2, 8)
        self.pages = torch.tensor([[1, 2], [4, 3]], dtype=torch.int32)
        self.query, self.out = (
            torch.zeros(2, 4, 8, device="npu"),
            torch.zeros(2, 4, 8, device="npu"),
        )
        self.device = [tensor.npu() for tensor in (self.keys, self.values, self.pages)]
        self.graph, _ = capture(self.launch, auto_dispatch_capture=True)

    def launch(self) -> None:
        keys, values, pages = self.device
        attention = torch.ops.npu.npu_fused_infer_attention_score
        first, _ = attention(
            self.query,
            keys.flatten(2),
            values.flatten(2),
            block_table=pages,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=[1, 1],
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            block_size=16,
            scale=0.5,
        )
        lengths = torch.tensor([1, 1], dtype=torch.int32)
        torch.ops.atb._npu_paged_attention(first, keys, values, 2, 4, 0.5, pages, lengths, self.out)

    def update(self, lengths: list[int]) -> None:
        self.graph.update(
            [
                {"actual_seq_lengths_kv": lengths},
                {"context_lens": torch.tensor(lengths, dtype=torch.int32)},
            ]
        )

    def expected(self, lengths: list[int]) -> torch.Tensor:
        query = self.query.cpu()
        for _ in range(2):
            query = torch.stack(
                [self._attend(query[b], self.pages[b], length) for b, length in enumerate(lengths)]
            )
        return query

    def _attend(self, query: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
        keys, values = (
            cache[pages].flatten(0, 1)[:length].transpose(0, 1)
            for cache in (self.keys, self.values)
        )
        scores = torch.einsum("ngd,nld->ngl", query.view(2, 2, 8), keys) * 0.5
        return torch.einsum("ngl,nld->ngd", scores.softmax(-1), values).reshape(4, 8)


LENGTHS = [[3, 17], [32, 5], [16, 32]]


def test_update_sets_the_lengths_of_the_next_replay(simnpu: Any) -> None:
    decode = Decode()
    for lengths in LENGTHS:
        decode.query.copy_(torch.randn(2, 4, 8))
        decode.update(lengths)
        decode.graph.replay()
        torch.testing.assert_close(decode.out.cpu(), decode.expected(lengths), rtol=0, atol=1e-5)


def test_update_may_come_from_another_thread_during_the_replay(simnpu: Any) -> None:
    decode = Decode()
    decode.query.copy_(torch.randn(2, 4, 8))
    for lengths in LENGTHS:
        with simnpu.limits(hang_seconds=20):
            timer = threading.Timer(0.05, decode.update, [lengths])
            timer.start()
            decode.graph.replay()
            timer.join()
        torch.testing.assert_close(decode.out.cpu(), decode.expected(lengths), rtol=0, atol=1e-5)


def test_each_replay_needs_its_update(simnpu: Any) -> None:
    decode = Decode()
    with simnpu.limits(hang_seconds=0.05):
        decode.graph.replay()
        with pytest.raises(RuntimeError, match="hardware would hang"):
            torch.npu.synchronize()
        decode.update([1, 1])
        decode.graph.replay()
        torch.npu.synchronize()
        decode.graph.replay()
        with pytest.raises(RuntimeError, match="hardware would hang"):
            decode.out.tolist()


def test_a_replay_may_be_launched_before_its_update(simnpu: Any) -> None:
    decode = Decode()
    for lengths in LENGTHS:
        decode.query.copy_(torch.randn(2, 4, 8))
        with simnpu.no_waiting():
            torch.npu.NPUGraph().graph_dispatch_mode.update_stream.wait_stream(
                torch.npu.current_stream()
            )
            decode.graph.replay()
            decode.update(lengths)
        torch.testing.assert_close(decode.out.cpu(), decode.expected(lengths), rtol=0, atol=1e-5)


def test_lengths_must_not_reach_the_replay_before(simnpu: Any) -> None:
    decode = Decode()
    decode.graph.replay()
    decode.update([3, 17])
    decode.graph.replay()
    with pytest.raises(RuntimeError, match="a replay of it still runs"):
        decode.update([32, 5])


@pytest.mark.parametrize("through", ["the stream", "another stream"])
def test_an_update_that_waits_for_its_own_replay_hangs(simnpu: Any, through: str) -> None:
    decode, updates, other = (
        Decode(),
        torch.npu.NPUGraph().graph_dispatch_mode.update_stream,
        torch.npu.Stream(),
    )
    decode.graph.replay()
    if through == "another stream":
        other.wait_stream(torch.npu.current_stream())
    updates.wait_stream(other if through == "another stream" else torch.npu.current_stream())
    with simnpu.limits(hang_seconds=0.05), pytest.raises(RuntimeError, match="hardware would hang"):
        decode.update([3, 17])


def test_a_launch_behind_a_replay_waits_for_the_update(simnpu: Any) -> None:
    decode = Decode()
    decode.graph.replay()
    with torch.npu.stream(torch.npu.Stream()):
        assert torch.ones(1, device="npu").add(1).device.type == "npu"
    with simnpu.limits(hang_seconds=0.05), pytest.raises(RuntimeError, match="hardware would hang"):
        decode.out.add_(1)


def test_a_name_not_given_at_capture_is_ignored_by_update(simnpu: Any) -> None:
    decode = Decode()
    decode.update([3, 17])
    decode.graph.update([{"actual_seq_lens_kv": [9, 9]}, {"context_len": [9, 9]}])
    decode.graph.replay()
    torch.testing.assert_close(decode.out.cpu(), decode.expected([3, 17]), rtol=0, atol=1e-5)


def test_update_needs_one_entry_for_each_launch(simnpu: Any) -> None:
    with pytest.raises(RuntimeError, match="2 operators"):
        Decode().graph.update([{}, {}, {}])


def test_update_needs_auto_dispatch_capture(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    graph, _ = capture(lambda: x + 1)
    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        graph.update([{}])


def test_an_update_is_checked_as_a_launch_is(simnpu: Any) -> None:
    decode = Decode()
    with pytest.raises(RuntimeError, match="must rise to T"):
        decode.graph.update([{"actual_seq_lengths": [2, 1]}, {}])
    decode.graph.update([{"actual_seq_lengths": [1, 2]}, {}])
    decode.update([3, 17])
    decode.graph.replay()
    torch.testing.assert_close(decode.out.cpu(), decode.expected([3, 17]), rtol=0, atol=1e-5)
