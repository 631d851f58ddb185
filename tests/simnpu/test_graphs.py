"""Capture, replay and update on the simulated NPU behave as torch_npu's graphs do."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from npu_captures import capture


def test_replay_reads_new_inputs(simnpu: Any) -> None:
    weight, x = torch.randn(8, 8, device="npu"), torch.zeros(4, 8, device="npu")
    graph, y = capture(lambda: (x @ weight).relu())
    for _ in range(3):
        x.copy_(torch.randn(4, 8))
        graph.replay()
        torch.testing.assert_close(y.cpu(), (x.cpu() @ weight.cpu()).relu())


def test_capture_executes_nothing(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")

    def work() -> torch.Tensor:
        x.add_(1)
        return x * 2

    graph, y = capture(work)
    assert x.tolist() == [1, 1, 1, 1]
    assert y.isnan().all(), "the output of a capture is garbage until the first replay"
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2] and y.tolist() == [4, 4, 4, 4]


def test_launches_are_recorded_in_order(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    graph, _ = capture(lambda: (x + 1).relu())
    assert simnpu.launches(graph) == ["aten::add.out", "aten::relu"]


def test_recorded_copy_reads_the_source_at_replay(simnpu: Any) -> None:
    source, target = torch.zeros(4, device="npu"), torch.zeros(4, dtype=torch.float16, device="npu")
    graph, _ = capture(lambda: target.copy_(source))
    source.fill_(3)
    graph.replay()
    assert target.tolist() == [3, 3, 3, 3]


def test_recorded_upload_reads_the_host_at_replay(simnpu: Any) -> None:
    host, target = torch.zeros(4).pin_memory(), torch.ones(4, device="npu")
    graph, _ = capture(lambda: target.copy_(host, non_blocking=True))
    assert target.tolist() == [1, 1, 1, 1]
    host.fill_(3)
    graph.replay()
    assert target.tolist() == [3, 3, 3, 3]


def test_output_that_a_kernel_sizes_can_be_captured(simnpu: Any) -> None:
    graph, positions = capture(lambda: torch.arange(5, device="npu"))
    graph.replay()
    assert positions.tolist() == [0, 1, 2, 3, 4]


def test_several_results_can_be_captured(simnpu: Any) -> None:
    x = torch.zeros(3, 5, device="npu")
    graph, (values, indices) = capture(lambda: x.topk(2))
    x.copy_(torch.randn(3, 5))
    graph.replay()
    assert torch.equal(values.cpu(), x.cpu().topk(2).values) and torch.equal(
        indices.cpu(), x.cpu().topk(2).indices
    )


def test_is_current_stream_capturing(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    assert not torch.npu.is_current_stream_capturing()

    def work() -> bool:
        x.add_(1)
        return bool(torch.npu.is_current_stream_capturing())

    assert capture(work)[1]
    assert not torch.npu.is_current_stream_capturing()


def test_the_stream_before_is_current_again(simnpu: Any) -> None:
    x, before = torch.ones(4, device="npu"), torch.npu.current_stream()
    capture(lambda: x + 1)
    assert torch.npu.current_stream() == before == torch.npu.default_stream()


def test_an_error_inside_ends_the_capture(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")

    def work() -> None:
        x.add_(1)
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        capture(work)
    assert torch.npu.current_stream() == torch.npu.default_stream()
    assert x.sum().item() == 4


def test_a_swallowed_error_still_invalidates_the_capture(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")

    def work() -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            x.sum().item()
        return x + 1

    with pytest.raises(RuntimeError, match="invalidated"):
        capture(work)


def test_after_an_invalidated_capture_the_stream_stays_current(simnpu: Any) -> None:
    """torch_npu's graph.__exit__ ends the capture first, and what that raises keeps it from
    restoring the stream.
    """
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="invalidated"):
        capture(lambda: x.sum().item())
    assert torch.npu.current_stream() != torch.npu.default_stream()


@pytest.mark.parametrize("error_mode", ["global", "thread_local"])
def test_other_threads_may_wait_only_if_the_capture_is_thread_local(
    simnpu: Any, error_mode: str
) -> None:
    x, failures = torch.ones(4, device="npu"), []

    def wait() -> None:
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            failures.append(error)

    def work() -> None:
        x.add_(1)
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    if error_mode == "thread_local":
        capture(work, capture_error_mode=error_mode)
        assert not failures
    else:
        with pytest.raises(RuntimeError, match="invalidated"):
            capture(work, capture_error_mode=error_mode)
        assert len(failures) == 1


def test_a_stream_that_waited_for_the_capture_takes_part(simnpu: Any) -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def work() -> torch.Tensor:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        torch.npu.current_stream().wait_stream(side)
        return y

    graph, y = capture(work)
    graph.replay()
    assert y.tolist() == [2, 2, 2, 2]


def test_a_stream_that_did_not_wait_may_not_launch(simnpu: Any) -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def work() -> torch.Tensor:
        with torch.npu.stream(side):
            return x + 1

    with pytest.raises(RuntimeError, match="does not take part"):
        capture(work)


def test_graphs_of_one_pool_share_addresses(simnpu: Any) -> None:
    pool, x = torch.npu.graph_pool_handle(), torch.ones(64, device="npu")
    first, y = capture(lambda: x + 1, pool=pool)
    address = y.data_ptr()
    del y
    second, z = capture(lambda: x + 2, pool=pool)
    assert z.data_ptr() == address and first.pool() == second.pool() == pool


def test_graphs_of_other_pools_do_not(simnpu: Any) -> None:
    x = torch.ones(64, device="npu")
    first, y = capture(lambda: x + 1)
    address = y.data_ptr()
    del y
    second, z = capture(lambda: x + 2)
    assert z.data_ptr() != address and first.pool() != second.pool()


def test_a_weak_reference_reads_what_the_replay_writes(simnpu: Any) -> None:
    x = torch.ones(64, device="npu")
    graph, y = capture(lambda: x + 1)
    weak = simnpu.weak_ref_tensor(y)
    del y
    graph.replay()
    assert weak.tolist() == [2] * 64


def test_reset_gives_the_pool_back_and_forbids_replay(emptied_simnpu: Any) -> None:
    x = torch.ones(64, device="npu")
    before, graphs = torch.npu.memory_reserved(), emptied_simnpu.live_graphs
    graph, y = capture(lambda: x + 1)
    assert emptied_simnpu.live_graphs == graphs + 1
    del y
    graph.reset()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before and emptied_simnpu.live_graphs == graphs
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_graph_is_captured_once(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    graph, _ = capture(lambda: x + 1)
    with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.npu.graph(graph):
        pass


def test_graphs_run_out_of_streams(simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    with simnpu.limits(graph_limit=simnpu.live_graphs + 2):
        graphs = [capture(lambda: x + 1) for _ in range(2)]
        with pytest.raises(RuntimeError, match="no stream left"):
            capture(lambda: x + 1)
        del graphs


def test_out_of_memory_in_a_capture(emptied_simnpu: Any) -> None:
    x = torch.ones(4, device="npu")
    with (
        emptied_simnpu.limits(total_memory=torch.npu.memory_reserved() + 2**22),
        pytest.raises(torch.OutOfMemoryError),
    ):
        capture(lambda: x.expand(2**22, 4) + 1)
    graph, y = capture(lambda: x + 1)
    graph.replay()
    assert y.tolist() == [2, 2, 2, 2]
