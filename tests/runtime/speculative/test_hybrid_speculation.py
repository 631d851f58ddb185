"""Models with recurrent states give the same answers with speculation as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models.sizes import DELTA, FALCON, SHORT_CONV
from tiny_models import make_tiny_model

from piecework import LLM, SamplingParams
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.sampling import grammar as grammars

MODELS = {
    "gated delta net": ("qwen3_5_text", DELTA),
    "short convolution": ("lfm2", SHORT_CONV),
    "mamba": ("mamba", {"state_size": 6, "time_step_rank": 5}),
    "mamba 2": ("falcon_h1", FALCON),
}
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.6, 1.5]),
    top_k=st.sampled_from([-1, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, None, 2]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    grammar=st.sampled_from([None, None, grammars.from_regex("(ab|abc|cd ){2,9}")]),
)
Jobs = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module", params=MODELS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, ...]]:
    architecture, sizes = MODELS[request.param]
    path = make_tiny_model(tmp_path_factory.mktemp("hybrid"), architecture, **sizes)
    fixed: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 2048}
    yield tuple(
        LLM(str(path), **fixed, speculative_algorithm=algorithm)
        for algorithm in ("none", "ngram", "prediction")
    )


@settings(deadline=None, max_examples=examples(3, exploring=100))
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(20, 24), min_size=1, max_size=50), PARAMS),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 40),
)
def test_speculation_changes_no_answer(engines: tuple[LLM, ...], jobs: Jobs, cut: int) -> None:
    plain, lookup, predicting = engines
    expected = run(plain, jobs, [[]] * len(jobs))
    assert_alike(run(lookup, jobs, [[]] * len(jobs)), expected)
    # A prediction that leaves out a part of the answer, and has another token in it.
    wrong = [[*one[0][:cut], 30, *one[0][cut + 3 :]] for one in expected]
    before = predicting.core.stats().accepted_tokens_total
    assert_alike(run(predicting, jobs, wrong), expected)
    accepted = predicting.core.stats().accepted_tokens_total - before
    assert accepted > 0 or all(len(one[0]) < 9 or not cut for one in expected)


def run(llm: LLM, jobs: Jobs, predictions: list[list[int]]) -> list[Any]:
    """Return tokens, log-probabilities and ends. Memory is checked after each step."""
    llm.core.flush_cache()
    found: dict[str, Any] = {}
    for number, ((prompt, params), prediction) in enumerate(zip(jobs, predictions, strict=True)):
        found[str(number)] = ([], [], [])
        llm.core.add(
            GenerateRequest(
                rid=str(number), input_ids=prompt, params=params, prediction_ids=prediction
            )
        )
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            tokens, logprobs, ends = found[output.rid]
            tokens += output.token_ids
            logprobs += [each.logprob for each in output.logprobs or []]
            if output.finish_reason is not None:
                ends += [output.finish_reason, output.stop_token_id, output.error]
        llm.core.check()
    stats = llm.core.stats()
    assert (stats.kv_tokens_used, stats.states_used) == (0, 0)
    return list(found.values())


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    """Log-probabilities may differ in the last bits: the states of several tokens are computed in
    another order than those of one.
    """
    for (tokens, logprobs, ends), (own, theirs, last) in zip(found, expected, strict=True):
        assert (tokens, ends) == (own, last)
        assert logprobs == pytest.approx(theirs, abs=1e-4)
