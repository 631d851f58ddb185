"""Captured sizes give the forward's answers, and a failure costs a graph, never an answer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_platform import RecordedGraph, RecordingPlatform
from torch.utils._python_dispatch import _get_current_dispatch_mode
from toy_forward import ToyModel, attention, step

from piecework.compilation.cache import CompileCache
from piecework.compilation.capture import Graphs, Reason
from piecework.compilation.compiler import CompiledPiece, EagerCompiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import named_tensors
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.recording import Recordable
from piecework.compilation.whole import BreakableForward, FullForward
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.platform.platform import Platform

SIZES = [4, 8, 16]
PIECES = 4


class PaddingCpu(CpuPlatform):
    padding_limit = 8.0


@contextmanager
def dummy_step(size: int, seed: int) -> Iterator[Sequence[torch.Tensor]]:
    yield step(size, seed=77 + seed)


def pieces_of(model: ToyModel, folder: Path) -> PiecewiseForward:
    maker = PieceMaker(
        platform=CpuPlatform(), compiler=EagerCompiler(), cache=CompileCache(folder), max_tokens=512
    )
    return maker.make(model, step(6))[0]


def make(model: ToyModel, forward: Recordable, platform: Platform, **settings: Any) -> Graphs:
    buffers = [torch.zeros(max(SIZES), dtype=torch.int64) for _ in range(2)]
    settings = {"sizes": SIZES, "dummy_step": dummy_step, "eager": model.forward} | settings
    return Graphs(forward, platform, buffers=buffers, **settings)


def captured(graphs: Graphs) -> Graphs:
    for size in graphs.pending():
        graphs.capture(size)
    return graphs


def check_answers(graphs: Graphs, model: ToyModel, lengths: Sequence[int]) -> None:
    for seed, length in enumerate(lengths):
        inputs = step(length, seed)
        size = graphs.choose(length)
        assert size is not None
        output = graphs.replay(size, inputs)
        assert output is not None
        torch.testing.assert_close(output, model(*inputs))


@pytest.fixture(autouse=True)
def leave_no_recording() -> Iterator[None]:
    """A split op that fails inside a breakable recording leaves the recorder entered, where a
    device's stream would be left.
    """
    yield
    while (mode := _get_current_dispatch_mode()) is not None:
        mode.__exit__(None, None, None)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyModel, PiecewiseForward]:
    model = ToyModel(PIECES - 1)
    return model, pieces_of(model, tmp_path_factory.mktemp("cache"))


FORWARDS: dict[str, Callable[[tuple[ToyModel, PiecewiseForward]], Recordable]] = {
    "pieces": lambda toy: toy[1],
    "breakable": lambda toy: BreakableForward(toy[0].forward),
    "full": lambda toy: FullForward(toy[0].forward),
}
ON = [
    ("pieces", PaddingCpu),
    ("full", PaddingCpu),
    *((name, RecordingPlatform) for name in FORWARDS),
]


@pytest.mark.parametrize(("forward", "platform"), ON)
def test_every_size_and_its_neighbours_equal_eager(
    toy: tuple[ToyModel, PiecewiseForward], forward: str, platform: type[Platform]
) -> None:
    graphs = captured(make(toy[0], FORWARDS[forward](toy), platform()))
    assert graphs.captured == SIZES
    check_answers(graphs, toy[0], [16, 3, 4, 5, 15, 7, 8, 9, 1, 2])
    assert graphs.stats.replays == 10
    assert graphs.stats.padded_tokens == 0 + 1 + 0 + 3 + 1 + 1 + 0 + 7 + 3 + 2


@pytest.mark.parametrize(("forward", "platform"), ON[:-1])
def test_split_ops_read_what_is_set_at_the_replay(
    toy: tuple[ToyModel, PiecewiseForward], forward: str, platform: type[Platform]
) -> None:
    graphs = captured(make(toy[0], FORWARDS[forward](toy), platform()))
    with attention(scale=2.5):
        check_answers(graphs, toy[0], [5, 8])


def test_a_split_op_may_return_a_new_tensor(tmp_path: Path) -> None:
    model = ToyModel(2, fresh=True)
    for forward in (pieces_of(model, tmp_path), BreakableForward(model.forward)):
        check_answers(captured(make(model, forward, RecordingPlatform())), model, [16, 3, 8])


def test_sizes_are_captured_from_large_to_small(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    assert make(*toy, PaddingCpu()).pending() == [16, 8, 4]


def test_one_graph_a_piece_and_size(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    platform = RecordingPlatform()
    graphs = captured(make(*toy, platform))
    assert graphs.stats.num_graphs == platform.captures == PIECES * len(SIZES)


def test_sizes_share_the_memory_of_the_largest(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    graphs = make(*toy, RecordingPlatform())
    graphs.capture(16)
    largest = graphs.stats.graph_bytes
    captured(graphs)
    assert 0 < graphs.stats.graph_bytes < 1.5 * largest


def test_the_next_replay_overwrites_the_last_result(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    graphs = captured(make(*toy, RecordingPlatform()))
    kept = graphs.replay(8, step(8, 1))
    assert kept is not None
    first = kept.clone()
    graphs.replay(8, step(8, 2))
    assert not torch.allclose(kept, first)


def test_an_unknown_length_runs_without_a_graph_and_is_counted(
    toy: tuple[ToyModel, PiecewiseForward],
) -> None:
    graphs = make(*toy, PaddingCpu())
    graphs.capture(16)
    assert graphs.choose(17) is None
    assert graphs.choose(1) is None
    assert graphs.choose(5) == 16
    assert graphs.stats.fallbacks == {Reason.TOO_LONG: 1, Reason.NOT_CAPTURED: 1}


def test_padding_over_the_platforms_limit_runs_without_a_graph(
    toy: tuple[ToyModel, PiecewiseForward],
) -> None:
    graphs = captured(make(*toy, CpuPlatform()))
    assert graphs.choose(8) == 8
    assert graphs.choose(7) is None
    assert graphs.stats.fallbacks == {Reason.PADDING: 1}


def test_a_cpu_cannot_break_a_recording(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    graphs = captured(make(toy[0], BreakableForward(toy[0].forward), PaddingCpu()))
    assert graphs.captured == []
    assert set(graphs.stats.disabled.values()) == {Reason.CAPTURE_FAILED}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no capture today"), torch.OutOfMemoryError("out of memory"), MemoryError()],
    ids=repr,
)
def test_a_capture_that_fails_disables_its_size_alone(
    toy: tuple[ToyModel, PiecewiseForward],
    forward: str,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    platform = RecordingPlatform()
    graphs_a_size = {"pieces": PIECES, "breakable": PIECES, "full": 1}[forward]
    platform.fail_at = {graphs_a_size + graphs_a_size // 2: error}
    graphs = captured(make(toy[0], FORWARDS[forward](toy), platform))
    assert graphs.captured == [4, 16]
    reason = Reason.CAPTURE_FAILED if type(error) is RuntimeError else Reason.OUT_OF_MEMORY
    assert graphs.stats.disabled == {8: reason}
    check_answers(graphs, toy[0], [16, 3, 4, 13])
    assert graphs.choose(8) == 16, "the next larger size takes its place"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "8 tokens run without a graph" in record.message
    assert "--" in record.message, "the line names a flag that helps"
    assert "\n" not in record.message


def failing_after(
    end: Callable[[RecordedGraph], None], platform: RecordingPlatform, captures: int
) -> Callable[[RecordedGraph], None]:
    """`end`, which then raises for that many captures begun."""

    def fails(graph: RecordedGraph) -> None:
        end(graph)
        if platform.captures == captures:
            raise RuntimeError("an op failed in the capture")

    return fails


# Each pair of a forward, a failure and a size in the default run.
@pytest.mark.parametrize(
    ("number", "how", "forward"),
    [
        pytest.param(
            *(number, how, forward), marks=[pytest.mark.slow] * ((number + second + third) % 3 > 0)
        )
        for number in range(3)
        for second, how in enumerate(("refused", "invalidated", "the work fails"))
        for third, forward in enumerate(FORWARDS)
    ],
)
def test_after_a_capture_that_failed_all_others_succeed(
    toy: tuple[ToyModel, PiecewiseForward],
    forward: str,
    how: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever size fails, at whichever of its graphs: the pool that the failure has ended is not
    asked for again.
    """
    graphs_a_size = {"pieces": PIECES, "breakable": PIECES, "full": 1}[forward]
    for piece in range(graphs_a_size):
        platform, capture = RecordingPlatform(), number * graphs_a_size + piece
        if how == "refused":
            platform.fail_at = {capture: RuntimeError("no capture today")}
        elif how == "invalidated":
            platform.invalidate_at = {capture}
        else:
            monkeypatch.setattr(
                RecordedGraph, "end", failing_after(RecordedGraph.end, platform, capture + 1)
            )
        graphs = captured(make(toy[0], FORWARDS[forward](toy), platform))
        monkeypatch.undo()
        failed = [16, 8, 4][number]
        assert graphs.stats.disabled == {failed: Reason.CAPTURE_FAILED}
        assert graphs.captured == [size for size in SIZES if size != failed]
        check_answers(graphs, toy[0], graphs.captured)


def test_after_a_replay_that_failed_a_size_can_still_be_captured(
    toy: tuple[ToyModel, PiecewiseForward],
) -> None:
    graphs = make(*toy, RecordingPlatform())
    graphs.capture(8)
    with attention(fail_in_layer=1):
        assert graphs.replay(8, step(8)) is None
    assert graphs.capture(4)
    check_answers(graphs, toy[0], [4])


def test_the_memory_of_every_pool_is_counted(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    platform = RecordingPlatform()
    graphs = make(*toy, platform)
    graphs.capture(16)
    largest = graphs.stats.graph_bytes
    platform.fail_at = {PIECES: RuntimeError("no capture today")}
    assert not graphs.capture(8) and graphs.capture(4)
    assert graphs.stats.graph_bytes > largest


def test_a_failing_split_op_disables_the_size(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    graphs = make(*toy, RecordingPlatform())
    with attention(fail_in_layer=1):
        assert not graphs.capture(8)
    assert graphs.capture(4)
    check_answers(graphs, toy[0], [4])


def test_a_failing_replay_gives_way_to_eager(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    graphs = captured(make(*toy, RecordingPlatform()))
    with attention(fail_in_layer=1):
        assert graphs.replay(8, step(8)) is None
    assert graphs.stats.disabled == {8: Reason.REPLAY_FAILED}
    check_answers(graphs, toy[0], [4, 8])


def test_a_wrong_piece_is_found_by_the_self_check(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    model, pieces = toy
    first, *others = pieces._pieces
    wrong = [CompiledPiece(lambda inputs: [output * 1.1 for output in first.run(inputs)]), *others]
    graphs = captured(
        make(
            model,
            PiecewiseForward(pieces.plan, wrong, named_tensors(model), torch.clone),
            RecordingPlatform(),
        )
    )
    assert graphs.captured == []
    assert set(graphs.stats.disabled.values()) == {Reason.WRONG_RESULT}


def test_a_stale_address_is_found_by_the_self_check(toy: tuple[ToyModel, PiecewiseForward]) -> None:
    model, _ = toy

    class ReadsTheFirstStep(FullForward):
        """Reads the tensor of the step that was captured, not the one that later steps are copied
        to.
        """

        def record(self, inputs: Any, recorder: Any) -> Any:
            self.first = inputs[0].clone()
            return FullForward(lambda ids, positions: model(self.first, positions)).record(
                inputs, recorder
            )

    graphs = captured(make(model, ReadsTheFirstStep(model.forward), RecordingPlatform()))
    assert set(graphs.stats.disabled.values()) == {Reason.WRONG_RESULT}


class KeepsViews(ToyModel):
    """A value dies in the piece that makes a view of it, which a later piece reads; others want its
    memory meanwhile.
    """

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        source = x * 3
        mixed = torch.empty_like(x)
        torch.ops.toy.attend(x, x, x, mixed, 0)
        view, x = source.t(), mixed + 1
        mixed = torch.empty_like(x)
        torch.ops.toy.attend(x, x, x, mixed, 1)
        at_once = [mixed * factor for factor in range(2, 10)]
        return torch.stack(at_once).sum(0) + view.t()


def test_a_view_that_a_piece_returns_keeps_its_source(tmp_path: Path) -> None:
    model = KeepsViews(1)
    check_answers(
        captured(make(model, pieces_of(model, tmp_path), RecordingPlatform())), model, [16, 3, 8]
    )


@pytest.mark.parametrize("kind", ["pieces", "breakable", "full", "full in pieces"])
def test_debug_finds_a_weight_that_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model = ToyModel(2)
    pieces = pieces_of(model, tmp_path)
    forwards: dict[str, Callable[[], Recordable]] = {
        "pieces": lambda: pieces,
        "breakable": lambda: BreakableForward(model),
        "full": lambda: FullForward(model),
        "full in pieces": lambda: FullForward(pieces),
    }
    graphs = captured(make(model, forwards[kind](), RecordingPlatform(), debug=True))
    check_answers(graphs, model, [8])
    model.layers[1].out.weight.data = model.layers[1].out.weight.data * 2
    assert graphs.replay(8, step(8)) is None
    assert graphs.stats.disabled == {8: Reason.INPUT_MOVED}
    assert "layers.1.out.weight has moved" in caplog.text


def test_garbage_collection_is_as_before_and_frozen_after_the_first(
    toy: tuple[ToyModel, PiecewiseForward],
) -> None:
    gc.unfreeze()
    graphs = make(*toy, PaddingCpu())
    try:
        graphs.capture(16)
        frozen = gc.get_freeze_count()
        assert frozen > 0
        graphs.capture(8)
        assert gc.get_freeze_count() <= frozen
        assert gc.isenabled()
    finally:
        gc.unfreeze()
