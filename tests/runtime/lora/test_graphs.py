"""Steps with adapters in pieces and graphs give what eager steps give, for any mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_here import CompiledHere
from recording_platform import RecordingPlatform
from sparse import sparse
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.compilation.core.errors import TraceError
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine import graph_startup
from piecework.runtime.executor import model_runner
from piecework.runtime.graphs import compile_pieces
from piecework.runtime.llm import LLM, Completion

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(5 + 3 * i)] for i in range(5)]
MIXTURES = [["n0", "n1", "", "n2", "n0"], ["n2"] * 5, ["", "", "n1", "", ""]]
PARAMS = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def settings(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(folder / f"{n}", base, seed=n, rank=3 + 9 * n) for n in range(3)]
    return {
        "model_path": str(base),
        "lora_modules": ",".join(f"n{n}={path}" for n, path in enumerate(adapters)),
        "max_loras": 3,
        "dtype": "float32",
        "max_total_tokens": 1024,
        "num_threads": 1,
        "disable_radix_cache": True,
    }


@pytest.fixture(scope="module")
def eager(settings: dict[str, Any]) -> LLM:
    return LLM(disable_cuda_graph=True, **settings)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(cache))
    monkeypatch.setattr(graph_startup, "start", CompiledHere)


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert [each.logprob for each in one.logprobs] == pytest.approx(
            [each.logprob for each in other.logprobs], abs=1e-4
        )


def ops_of(llm: LLM) -> list[list[str]]:
    """Return the ops of each piece of steps without and with adapters."""
    kinds = llm.core._runner.graphs.kinds  # type: ignore[attr-defined]
    return [
        [op for part in kind.prefill.pieces for piece in part.plan.pieces for op in piece.ops]
        for kind in kinds
    ]


def test_pieces(settings: dict[str, Any], eager: LLM) -> None:
    llm = LLM(piecewise_cuda_graph=True, piecewise_cuda_graph_compiler="eager", **settings)
    without, adapted = ops_of(llm)
    assert not [op for op in without if "lora" in op]
    assert [op for op in adapted if "lora" in op]
    for names in MIXTURES:
        wanted = eager.generate(PROMPTS, PARAMS, adapters=names)
        assert len({tuple(each.token_ids) for each in wanted}) == len(PROMPTS)
        assert_same(llm.generate(PROMPTS, PARAMS, adapters=names), wanted)
    stats = llm.core.stats()
    assert stats.piecewise_steps_total == stats.steps_total


@pytest.mark.parametrize("backend", sparse(["piecewise", "breakable", "full"], kept=["piecewise"]))
def test_recorded_steps(
    settings: dict[str, Any], eager: LLM, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = RecordingPlatform()
    monkeypatch.setattr(model_runner, "detect", lambda name: platform)
    llm = LLM(
        cuda_graph_backend_prefill=backend,
        piecewise_cuda_graph_compiler="eager",
        piecewise_cuda_graph_tokens="16,64",
        cuda_graph_bs="4,8",
        context_length=128,
        **settings,
    )
    assert llm.info.graphs.failed_sizes == {}
    for names in [*MIXTURES, [""] * 5]:
        wanted = eager.generate(PROMPTS, PARAMS, adapters=names)
        before = llm.core.stats()
        assert_same(llm.generate(PROMPTS, PARAMS, adapters=names), wanted)
        after = llm.core.stats()
        replays = after.graph_replays_total - before.graph_replays_total
        # All prompts together have 55 tokens.
        assert replays == after.steps_total - before.steps_total


def test_steps_without_adapters_keep_their_pieces_if_those_with_adapters_have_none(
    settings: dict[str, Any], eager: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    make, starts = compile_pieces.make_pieces, []

    def failing(*arguments: Any, adapters: Any = None, **others: Any) -> Any:
        starts.append(adapters is not None)
        if adapters is not None:
            raise TraceError("seeded")
        return make(*arguments, **others)

    monkeypatch.setattr(compile_pieces, "make_pieces", failing)
    llm = LLM(piecewise_cuda_graph=True, piecewise_cuda_graph_compiler="eager", **settings)
    assert starts == [False, True]
    for names, in_pieces in (([""] * 5, True), (MIXTURES[0], False)):
        before = llm.core.stats()
        wanted = eager.generate(PROMPTS, PARAMS, adapters=names)
        assert_same(llm.generate(PROMPTS, PARAMS, adapters=names), wanted)
        after = llm.core.stats()
        assert (after.piecewise_steps_total > before.piecewise_steps_total) == in_pieces
