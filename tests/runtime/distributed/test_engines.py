"""Whole engines on two ranks answer as one process does: batches, caches, pieces and graphs; and
what goes wrong with a graph on one rank is given up on both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import NoReturn, TypeVar

import pytest
from compiled_here import CompiledHere
from graph_engines import PARAMS as ALL_GREEDY
from graph_engines import PROMPTS, SIZES, Inbox, assert_same, pieces, settings
from thread_ranks import ThreadRanks, current_rank, on_ranks, thread_ranks
from tiny_models import make_tiny_model

from piecework.compilation import capture, self_check
from piecework.compilation.core.errors import CaptureError
from piecework.compilation.piece_store import PieceStore
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.recording import Recorder
from piecework.kernels.platform.platform import Platform
from piecework.runtime import llm as llm_module
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.engine_info import GraphInfo
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed.ranks import EngineEnded
from piecework.runtime.engine import graph_startup as startup
from piecework.runtime.engine.build import Engine, build_engine
from piecework.runtime.engine.rank_process import follow
from piecework.runtime.engine.text import TextEngine
from piecework.runtime.executor import step
from piecework.runtime.graphs import prefill
from piecework.runtime.llm import LLM, Completion

T = TypeVar("T")
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(seed=7, max_new_tokens=5, ignore_eos=True, logprobs=0),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def lead_two(
    path: Path, lead: Callable[[ThreadRanks, EngineConfig], T], **others: object
) -> tuple[T, Engine]:
    """What `lead` returns on rank 0, and the other rank's engine, which follows."""
    chosen = {"piecewise_cuda_graph": False, **settings(tp_size=2, **others)}
    config = EngineConfig(model_path=str(path), **chosen)
    engines: list[Engine] = []
    with thread_ranks(2) as ranks:

        def on_rank(rank: int) -> T | None:
            if rank == 0:
                try:
                    return lead(ranks, config)
                finally:
                    ranks.close()
            engines.append(build_engine(config, progress=False, ranks=ranks))
            with suppress(EngineEnded):
                follow(TextEngine(engines[0]), ranks)
            return None

        answer = on_ranks(ranks, on_rank)[0]
    assert answer is not None
    return answer, engines[0]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[T, Engine]]:
    """What `use` returns for an `LLM` of two ranks with such settings, and the other rank's
    engine.
    """

    def run(path: Path, use: Callable[[LLM], T], **others: object) -> tuple[T, Engine]:
        def lead(ranks: ThreadRanks, config: EngineConfig) -> T:
            monkeypatch.setattr(llm_module, "start_ranks", lambda *_: ranks)
            return use(LLM(str(path), **settings(tp_size=2, **others)))

        return lead_two(path, lead, **others)

    return run


def generate(llm: LLM) -> list[Completion]:
    """Prompts that begin alike, with all there is to be computed of them, twice; and some whose
    tokens each rank chooses a share of.
    """
    prompts = [PROMPTS[-1][:20] + prompt for prompt in PROMPTS[:6]]
    params = [PARAMS[number % len(PARAMS)] for number in range(len(prompts))]
    shared = [
        SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True),
        SamplingParams(seed=3, max_new_tokens=5, ignore_eos=True),
        SamplingParams(seed=4, top_p=0.9, max_new_tokens=3, ignore_eos=True),
    ]
    return [
        *llm.generate(prompts, params),
        *llm.generate(prompts[:3], params[:3]),
        *llm.generate(prompts[:3], shared),
    ]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({}, id="alone in their steps"),
        pytest.param({"chunked_prefill_size": 24}, id="mixed steps"),
        pytest.param({"max_total_tokens": 96}, id="few pages"),
        pytest.param({"disable_overlap_schedule": False}, id="overlapping steps"),
    ],
)
def test_ranks_answer_as_one_process_does(
    path: Path, two_ranks: Callable[..., tuple[list[Completion], Engine]], others: dict[str, int]
) -> None:
    alone = LLM(str(path), **settings(**others))
    expected = generate(alone)
    answers, other = two_ranks(path, generate, **others)
    for ours, wanted in zip(answers, expected, strict=True):
        assert_same(ours, wanted)
        assert ours.cached_tokens == wanted.cached_tokens
    assert other.core.stats() == alone.core.stats()
    other.core.check()


def answers_and_graphs(llm: LLM) -> tuple[list[Completion], GraphInfo]:
    return generate(llm), llm.info.graphs


def one_at_a_time(load: Callable[..., T], lock: Lock) -> Callable[..., T]:
    """torch.fx changes modules for all threads while it reads a graph."""

    def load_alone(*arguments: object, **settings: object) -> T:
        with lock:
            return load(*arguments, **settings)

    return load_alone


@pytest.fixture
def compiled(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Completion]:
    """Pieces are compiled in this process; what they are to answer."""
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(startup, "start", CompiledHere)
    lock = Lock()
    for owner, name in ((self_check, "_load"), (PieceStore, "load_piece")):
        monkeypatch.setattr(owner, name, one_at_a_time(getattr(owner, name), lock))
    return generate(LLM(str(path), **settings()))


def test_pieces_and_graphs_come_in_on_all_ranks(
    path: Path,
    two_ranks: Callable[..., tuple[tuple[list[Completion], GraphInfo], Engine]],
    compiled: list[Completion],
) -> None:
    (answers, graphs), other = two_ranks(path, answers_and_graphs, **pieces())
    assert graphs.distinct_pieces > 0
    assert graphs.prefill_sizes == other.runner.graphs.info().prefill_sizes == SIZES
    for ours, wanted in zip(answers, compiled, strict=True):
        assert_same(ours, wanted)


def test_a_size_that_fails_on_one_rank_is_captured_on_none(
    path: Path,
    two_ranks: Callable[..., tuple[tuple[list[Completion], GraphInfo], Engine]],
    compiled: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = capture.Graphs._record

    def fail(self: capture.Graphs, size: int, recorder: Recorder) -> None:
        record(self, size, recorder)
        if size == 16 and current_rank() == 1:
            raise MemoryError("no memory on this rank")

    monkeypatch.setattr(capture.Graphs, "_record", fail)
    (answers, graphs), other = two_ranks(path, answers_and_graphs, **pieces())
    assert graphs.prefill_sizes == other.runner.graphs.info().prefill_sizes == [4, 33]
    for ours, wanted in zip(answers, compiled, strict=True):
        assert_same(ours, wanted)


def test_pieces_that_are_wrong_on_one_rank_run_on_none(
    path: Path,
    two_ranks: Callable[..., tuple[tuple[list[Completion], GraphInfo], Engine]],
    compiled: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = prefill.PrefillGraph.check

    def fail(self: prefill.PrefillGraph, forward: PiecewiseForward) -> Iterator[bool]:
        for number, portion in enumerate(check(self, forward)):
            if number == 4 and current_rank() == 1:
                raise CaptureError("other numbers on this rank")
            yield portion

    monkeypatch.setattr(prefill.PrefillGraph, "check", fail)
    (answers, graphs), other = two_ranks(path, answers_and_graphs, **pieces())
    assert graphs.distinct_pieces == other.runner.graphs.info().distinct_pieces == 0
    for ours, wanted in zip(answers, compiled, strict=True):
        assert_same(ours, wanted)


def test_requests_run_on_all_ranks_while_graphs_come_in(
    path: Path, compiled: list[Completion]
) -> None:
    inbox = Inbox([(3 * number, prompt) for number, prompt in enumerate(PROMPTS)])

    def lead(ranks: ThreadRanks, config: EngineConfig) -> dict[str, list[int]]:
        return inbox.serve(build_engine(config, progress=False, ranks=ranks))

    tokens, other = lead_two(path, lead, **pieces())
    expected = LLM(str(path), **settings()).generate(PROMPTS, ALL_GREEDY)
    assert list(tokens.values()) == [completion.token_ids for completion in expected]
    assert other.runner.graphs.info().prefill_sizes == SIZES
    assert other.core.stats().graph_fallbacks_total["starting"] > 0


def test_a_step_that_raises_ends_an_engine_of_several_ranks(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an exit code that the user would have to mend: it is started again."""

    def fail(logits: object, *_: object) -> NoReturn:
        raise RuntimeError("no number can be drawn")

    monkeypatch.setattr(step, "sample", fail)

    def lead(ranks: ThreadRanks, config: EngineConfig) -> None:
        Inbox([(0, PROMPTS[0])]).serve(build_engine(config, progress=False, ranks=ranks))

    with pytest.raises(SystemExit) as ended:
        lead_two(path, lead)
    assert ended.value.code == 1
    assert "the engine's 2 ranks end: no number can be drawn" in caplog.text


def test_every_rank_gives_memory_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After loading, behind its first steps, and whenever rank 0 does."""
    given: list[int] = []
    monkeypatch.setattr(Platform, "give_back_memory", lambda self: given.append(get_ident()))

    def lead(ranks: ThreadRanks, config: EngineConfig) -> int:
        build_engine(config, progress=False, ranks=ranks).runner.give_back_memory()
        return 1

    lead_two(path, lead)
    assert sorted(Counter(given).values()) == [3, 3]


def test_every_rank_lets_go_of_its_last_step_with_its_memory(path: Path) -> None:
    kept: list[bool] = []

    def lead(ranks: ThreadRanks, config: EngineConfig) -> int:
        core, runner, _ = build_engine(config, progress=False, ranks=ranks)
        core.add(GenerateRequest(rid="r", input_ids=PROMPTS[0], params=ALL_GREEDY))
        while core.has_work:
            core.step()
        kept.append(runner.layout._decodes is not None)
        runner.give_back_memory()
        kept.append(runner.layout._decodes is not None)
        return 1

    _, other = lead_two(path, lead)
    assert kept == [True, False] and other.runner.layout._decodes is None
