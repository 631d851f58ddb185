"""Proposals are verified by the attention of NVIDIA GPUs, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from piecework import LLM, SamplingParams
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.core.generation import GenerateRequest

pytest.importorskip("triton")

PROMPTS = [[5, 6, 7], list(range(9, 20))]
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.9, seed=3, ignore_eos=True)


@pytest.mark.slow
def test_answers_are_those_without_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piecework.kernels.triton.attention import TritonAttention

    monkeypatch.setattr(CpuPlatform, "choose_attention", lambda *_: "triton")
    monkeypatch.setattr(CpuPlatform, "make_attention_backend", lambda *_: TritonAttention())
    model = make_tiny_model(tmp_path, num_hidden_layers=2)
    expected, _ = _answers(model, "none", [[], []])
    wrong = [[*tokens[:5], 30, *tokens[6:]] for tokens in expected]
    found, accepted = _answers(model, "prediction", wrong)
    assert found == expected and accepted > 4


def _answers(
    model: Path, algorithm: str, predictions: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, and how many of them were proposed."""
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 512}
    llm = LLM(str(model), speculative_algorithm=algorithm, **settings)
    if llm.core._speculation is not None:
        # Times of the interpreter would say that proposals do not pay.
        llm.core._speculation.costs.read = lambda step: None  # type: ignore[method-assign]
    for number, (prompt, prediction) in enumerate(zip(PROMPTS, predictions, strict=True)):
        request = GenerateRequest(
            rid=str(number), input_ids=prompt, params=PARAMS, prediction_ids=prediction
        )
        llm.core.add(request)
    found: dict[str, list[int]] = {}
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            found.setdefault(output.rid, []).extend(output.token_ids)
        llm.core.check()
    return [found["0"], found["1"]], llm.core.stats().accepted_tokens_total
