"""SmolLM2 answers word problems with the same tokens in compiled pieces with recorded decodes as
without any graph, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.files.resolve import resolve_model_path
from piecework.runtime.llm import LLM

SHOTS = (
    "Question: A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are "
    "left?\n"
    "Answer: The baker makes 6*12 = <<6*12=72>>72 rolls. 72-50 = <<72-50=22>>22 rolls are "
    "left.\n#### 22\n\n"
    "Question: Mia reads 15 pages a day for 4 days and then 30 pages on the fifth day. How many "
    "pages has she read?\n"
    "Answer: She reads 15*4 = <<15*4=60>>60 pages in 4 days. In all she reads 60+30 = "
    "<<60+30=90>>90 pages.\n#### 90\n\n"
)
QUESTIONS = [
    "Tom has 3 boxes of 24 pencils and gives a third of all pencils away. How many pencils does he "
    "keep?",
    "A train travels 80 kilometres in the first hour and half as far in the second. How far does "
    "it travel in two hours?",
    "Sara earns $12 an hour. She works 5 hours on each of 4 days and spends $60. How much money "
    "has she left?",
    "A farmer has twice as many sheep as goats. Together they are 96. How many sheep does the "
    "farmer have?",
]
PROMPTS = [
    f"{SHOTS[: len(SHOTS) * bool(number % 2)]}Question: {question}\nAnswer:"
    for number, question in enumerate(QUESTIONS)
]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)


@pytest.mark.slow
def test_graphs_on_and_off_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    try:
        path = resolve_model_path("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 4096,
        "context_length": 512,
        "num_threads": 1,
    }
    graphs = LLM(
        path,
        piecewise_cuda_graph=True,
        piecewise_cuda_graph_compiler="inductor",
        cuda_graph_backend_decode="full",
        cuda_graph_bs="1,2,4",
        **settings,
    )
    ours = graphs.generate(PROMPTS, PARAMS)
    stats = graphs.core.stats()
    assert (
        graphs.info.graphs.failed_sizes == {}
        and stats.piecewise_steps_total > 0
        and stats.graph_replays_total >= 60
    )
    eager = LLM(path, disable_piecewise_cuda_graph=True, disable_cuda_graph=True, **settings)
    theirs = eager.generate(PROMPTS, PARAMS)
    assert eager.core.stats().graph_replays_total == eager.core.stats().piecewise_steps_total == 0
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
