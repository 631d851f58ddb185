"""Split models in pieces with the passes of collectives on: the answers of one process, short and
long steps each by their own forward, and bytes that are sent as they are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.compilation.by_length import ForwardByLength
from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler
from piecework.compilation.core.errors import NotStoredError
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.piece_maker import PieceMaker, run
from piecework.compilation.piece_store import PieceStore
from piecework.compilation.self_check import check_pieces
from piecework.kernels import collectives
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.graphs.lone_rank import LoneRank
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.loader.parallel import Shard
from tests.split_models import PROMPT, answer, load
from tests.thread_ranks import ThreadRanks, on_ranks

RANKS, LAYERS = 2, 2
ALL = "none,+noop,+sequence_parallel,+async_tp,+allreduce_norm,+lower,+in_place"
Forward = Any


class Counted(ThreadRanks):
    """Counts the bytes that rank 0 sends: all but its own share, in each direction."""

    sent = 0

    def _count(self, whole: int) -> None:
        if self.rank == 0:
            self.sent += whole * (self.size - 1) // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count(2 * x.nbytes)
        return super().all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x.nbytes * self.size)
        return super().all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x.nbytes)
        return super().reduce_scatter(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture
def group() -> Iterator[Counted]:
    ranks = Counted(RANKS)
    collectives.set_group(collectives.TENSOR_PARALLEL, ranks)
    yield ranks
    collectives.set_group(collectives.TENSOR_PARALLEL, None)


def store(kind: type, path: Path, passes: str) -> Any:
    return kind(
        platform=CpuPlatform(),
        compiler=EagerCompiler(),
        cache=CompileCache(path),
        max_tokens=128,
        passes=PassConfig.parse(passes),
        ranks=RANKS,
    )


def forwards_of(models: list[Any], path: Path, passes: str) -> list[Forward]:
    register_attention("CPU")
    example = [torch.arange(64), torch.arange(64)]
    maker = store(PieceMaker, path, passes)
    return [maker.make(model, example, model_key="tiny").forward for model in models]


def test_short_and_long_steps_say_what_one_process_says(
    folder: Path, tmp_path: Path, group: Counted
) -> None:
    models = [load(folder, Shard(rank, RANKS)) for rank in range(RANKS)]
    forwards = forwards_of(models, tmp_path, f"{ALL},sequence_parallel_tokens=16")
    assert all(isinstance(each, ForwardByLength) and each.tokens == 16 for each in forwards)
    # The second rank has loaded what the first has made.
    assert [part.plan for part in forwards[0].parts] == [part.plan for part in forwards[1].parts]
    said = on_ranks(group, lambda rank: answer(models[rank], RANKS, forward=forwards[rank]))
    expected, sums = answer(load(folder)), 2 * LAYERS + 1
    for each in said:
        assert each.tokens == expected.tokens
        assert (each.logprobs - expected.logprobs).abs().max() < 1e-4
    # 37 tokens of the prompt, padded to 38; four decodes; and the logits of each.
    assert len(PROMPT) % RANKS
    counts = Counter(group.calls)
    assert counts["reduce_scatter"] == sums and counts["all_reduce"] == 4 * sums
    assert counts["all_gather"] == sums + 5


@pytest.mark.parametrize("passes", ["none", ALL])
def test_bytes_are_sent_as_the_plan_tells(
    folder: Path, tmp_path: Path, group: Counted, passes: str
) -> None:
    models = [load(folder, Shard(rank, RANKS)) for rank in range(RANKS)]
    forwards, tokens = forwards_of(models, tmp_path, passes), 8
    for number, part in enumerate(forwards[0].parts):
        group.sent = 0
        on_ranks(group, lambda rank, number=number: _run(forwards[rank].parts[number], tokens))  # type: ignore[misc]
        assert group.sent == tokens * part.plan.sent[1] > 0
        assert part.plan.sent[0] == part.plan.sent[1]


def _run(forward: Forward, tokens: int) -> None:
    """Each piece once for each of its calls, on zeros."""
    plan = forward.plan
    for piece, calls in plan.calls().items():
        numbered = zip(plan.first_call(piece).inputs, plan.pieces[piece].inputs, strict=True)
        values = {n: spec.empty(tokens).zero_() for n, spec in numbered if not spec.weight}
        for _ in range(calls):
            forward.run_piece(piece, values)


def test_pieces_for_long_steps_are_checked_at_numbers_that_they_are_good_for(
    folder: Path, tmp_path: Path, group: Counted
) -> None:
    (forward,) = forwards_of([load(folder, Shard(0, RANKS))], tmp_path, ALL)
    asked: set[int] = set()

    def inputs(size: int) -> list[torch.Tensor]:
        asked.add(size)
        return [torch.arange(size), torch.arange(size)]

    LoneRank(RANKS).make_group(CpuPlatform())
    for _ in check_pieces(forward.long, inputs, 65, lambda error: False):
        pass
    assert asked == {24, 4, 66}


def test_a_process_that_serves_loads_both_or_misses_them(folder: Path, tmp_path: Path) -> None:
    models = [load(folder, Shard(0, RANKS))]
    with_both = f"{ALL},sequence_parallel_tokens=7"
    forwards_of(models, tmp_path, ALL.replace(",+sequence_parallel", ""))
    serving = store(PieceStore, tmp_path, with_both)
    with pytest.raises(NotStoredError):
        run(serving.load(models[0], "tiny"))
    forwards_of(models, tmp_path, with_both)
    loaded = run(serving.load(models[0], "tiny"))
    # Rounded up to what the long forward is good for.
    assert isinstance(loaded.forward, ForwardByLength) and loaded.forward.tokens == 8
    assert len(loaded.report.loaded) == 6
