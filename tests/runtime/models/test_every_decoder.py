"""Every class of decoders that transformers has says here what it says there, or is refused by one
sentence: tiny random models, by our own code or by transformers' with our attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

from piecework import LLM, SamplingParams
from tests.runtime.models.test_all_architectures import assert_clear

PROMPT = [(31 + 7 * j * j) % 500 for j in range(60)]
# Their parts have sizes of their own, which the members of a tiny model do not reach.
LARGE = {
    *("blt", "emu3", "got_ocr2"),
    *("gemma4", "gemma4_unified", "gemma4_unified_assistant"),
}
pytestmark = pytest.mark.slow


def reference(folder: Path, kind: str) -> list[float]:
    """The log-probabilities of the prompt by transformers' code."""
    try:
        make_tiny_model(folder, kind)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0]
    except Exception as error:
        pytest.skip(f"transformers makes no tiny model of it: {error}"[:300])
    said = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])
    return [float(one) for one in said[:, 0]]


@pytest.mark.parametrize("kind", sorted(DECODERS.keys() - LARGE))
def test_a_decoder_says_what_transformers_says_or_is_refused(kind: str, tmp_path: Path) -> None:
    wanted = reference(tmp_path / "model", kind)
    settings: dict[str, Any] = {"max_total_tokens": 512, "context_length": 256}
    try:
        llm = LLM(str(tmp_path / "model"), dtype="float32", num_threads=1, **settings)
    except ValueError as error:
        assert_clear(str(error))
        pytest.skip(f"refused: {error}"[:300])
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=0)
    (answer,) = llm.generate([PROMPT], params)
    found = [one.logprob for one in answer.prompt_logprobs or [] if one]
    assert found == pytest.approx(wanted, abs=2e-3)
