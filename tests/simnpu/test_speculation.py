"""Speculation on a device whose steps overlap: the CPU's tokens, by the graphs of decodes, at times
that are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import make_cycle
from models.sizes import SHORT_CONV
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate((3, 40))]
PARAMS = [
    SamplingParams(temperature=temperature, seed=7, max_new_tokens=20, ignore_eos=True, logprobs=1)
    for temperature in (0.9, 0.0)
]
SLOW = pytest.mark.slow
DEVICE = {
    "device": "npu",
    "cuda_graph_backend_decode": "full",
    "cuda_graph_bs": "4,16",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(NpuPlatform, "padding_limit", 8.0)
    # Hardware's kernel takes 16 bits alone; the simulated one takes 32, in which answers are
    # compared tightly.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))


def engine(path: Path, algorithm: str, **settings: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float32",
        max_total_tokens=4096,
        context_length=384,
        num_threads=1,
        speculative_algorithm=algorithm,
        **settings,
    )


@pytest.mark.parametrize(
    "method", ["prediction", *(pytest.param(name, marks=SLOW) for name in ("draft", "eagle3"))]
)
def test_proposals_are_verified_by_the_graphs_of_decodes(
    tmp_path: Path, simnpu: Any, method: str
) -> None:
    settings: dict[str, Any] = {}
    if method == "eagle3":
        path, head = make_cycle(tmp_path)
        settings["speculative_draft_model_path"] = str(head)
    else:
        path = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    if method == "draft":
        settings["speculative_draft_model_path"] = str(path)
    expected = _answers(engine(path, "none"), [[]] * 2)
    # A prediction with an error in it. The other request has none, so that steps overlap, too.
    tokens = expected[0][0]
    predictions = [[*tokens[:9], 5, *tokens[10:]], []]
    algorithm = "auto" if method == "draft" else method
    llm = engine(path, algorithm, **DEVICE, **settings)
    assert llm.info.overlap_schedule
    found = _answers(llm, predictions if method == "prediction" else [[]] * 2)
    for (tokens, logprobs), (wanted, their) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(their, abs=1e-4)
    stats = llm.core.stats()
    # Whether drafts pay is measured, so a busy machine asks for fewer of them.
    assert stats.accepted_tokens_total > (0 if method == "draft" else 8)
    # Nothing but the prompts runs without a graph.
    assert stats.graph_replays_total >= stats.steps_total - 4
    costs = llm.core._speculation.costs  # type: ignore[union-attr]
    assert costs._alone.is_known and 0 < costs.plain(2) < 10


@pytest.mark.slow
def test_states_go_back_on_a_device_whose_steps_overlap(tmp_path: Path, simnpu: Any) -> None:
    path = make_tiny_model(tmp_path / "model", "lfm2", **SHORT_CONV)
    expected = _answers(engine(path, "none"), [[]] * 2)
    tokens = expected[0][0]
    llm = engine(path, "prediction", **DEVICE)
    for wrong in ({5}, {2, 9, 10}):
        guessed = [token + 1 if place in wrong else token for place, token in enumerate(tokens)]
        before = llm.core.stats()
        found = _answers(llm, [guessed, []])
        for (own, logprobs), (wanted, their) in zip(found, expected, strict=True):
            assert own == wanted
            assert logprobs == pytest.approx(their, abs=1e-4)
        after = llm.core.stats()
        assert after.accepted_tokens_total > before.accepted_tokens_total
    assert after.overlapped_steps_total > 0 and after.states_used == 0


def _answers(llm: LLM, predictions: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in PROMPTS]
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        llm.core.add(
            GenerateRequest(
                rid=str(number),
                input_ids=prompt,
                params=params,
                prediction_ids=predictions[number],
            )
        )
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            assert output.error is None
            tokens, logprobs = found[int(output.rid)]
            tokens += output.token_ids
            logprobs += [each.logprob for each in output.logprobs or []]
        llm.core.check()
    return found
