"""A model gives the same tokens and log-probabilities with speculation as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from piecework import LLM, SamplingParams
from piecework.kernels.cpu.native import build
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.sampling import grammar as grammars

pytestmark = pytest.mark.skipif(
    not build.runnable_variants()[0].needs, reason="decodes run op by op on this CPU"
)

GRAMMARS = [
    None,
    grammars.from_regex("(ab|abc|cd ){2,9}"),
    grammars.from_json_schema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}},
                "required": ["kind", "age"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 4,
        }
    ),
]
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.6, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([-1, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {11: 3.0}]),
    logprobs=st.sampled_from([None, None, 2]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    grammar=st.sampled_from(GRAMMARS),
    thinking_budget=st.sampled_from([None, None, 4]),
    thought_end_ids=st.just([17, 18]),
)


@pytest.fixture(scope="module", params=[None, 20], ids=["full", "window"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    shape = {"architecture": "mistral", "sliding_window": request.param, "num_hidden_layers": 2}
    path = make_tiny_model(tmp_path_factory.mktemp("speculation"), **shape)
    yield tuple(
        LLM(
            str(path),
            dtype="bfloat16",
            num_threads=1,
            max_total_tokens=2048,
            batch_invariant=True,
            speculative_algorithm=algorithm,
        )
        for algorithm in ("none", "ngram", "prediction")
    )
    library = build.load_kernels()
    assert library is not None
    library.piecework_set_batch_invariant(0)


@settings(deadline=None, max_examples=examples(6, exploring=200))
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.integers(20, 24), min_size=1, max_size=50), PARAMS),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 40),
)
def test_speculation_changes_nothing(
    engines: tuple[LLM, LLM, LLM], jobs: list[tuple[list[int], SamplingParams]], cut: int
) -> None:
    plain, lookup, predicting = engines
    expected = _run(plain, jobs, [[]] * len(jobs))
    assert _run(lookup, jobs, [[]] * len(jobs)) == expected
    # A prediction that leaves out a part of the answer, and has another token in it.
    wrong = [[*one[0][:cut], 30, *one[0][cut + 3 :]] for one in expected]
    assert _run(predicting, jobs, wrong) == expected
    assert predicting.core.stats().accepted_tokens_total > 0 or all(
        len(one[0]) < 3 for one in expected
    )


def _run(
    llm: LLM, jobs: list[tuple[list[int], SamplingParams]], predictions: list[list[int]]
) -> list[Any]:
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
            logprobs += output.logprobs or []
            if output.finish_reason is not None:
                ends += [output.finish_reason, output.stop_token_id, output.error]
        llm.core.check()
    assert llm.core.stats().kv_tokens_used == 0
    return list(found.values())
