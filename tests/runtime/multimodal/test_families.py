"""Each family of models of images and text against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from sparse import sparse
from tiny_vision import FAMILIES, make_tiny_vision, picture_file
from vision_engines import Prompt, Reference, VisionEngine

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.multimodal.preprocess_process import Preprocessor

TOLERANCE = 2e-3
FIRST, SECOND = picture_file(48, 40), picture_file(30, 90, seed=1)
TURNS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


class Case(NamedTuple):
    folder: Path
    preprocessor: Preprocessor
    reference: Reference


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)
    return Case(folder, Preprocessor(str(folder)), Reference(folder))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the layers of vision towers, also those of small images."""
    monkeypatch.setattr(CpuPlatform, "encoder_rows", 5)


def agrees(case: Case, prompt: Prompt, tokens: list[int], logprobs: list[float]) -> bool:
    wanted = case.reference.logprobs(prompt, tokens)
    assert len(logprobs) == len(tokens) == len(wanted)
    return logprobs == pytest.approx(wanted, abs=TOLERANCE)


# In the default run the other families have whole prompts in the pieces of the test below.
@pytest.mark.parametrize(
    "case", sparse(FAMILIES, kept=["idefics3", "qwen2_5_vl", "gemma3"]), indirect=True
)
def test_the_text_after_images_is_that_of_transformers(case: Case) -> None:
    engine = VisionEngine(case.folder)
    texts = {
        "What is IMAGE here?": [FIRST],
        "Compare IMAGE with IMAGE now": [FIRST, SECOND],
        f"{TURNS}<|im_start|>user\nIMAGE what?<|im_end|>\n": [SECOND],
    }
    answers = []
    for text, files in texts.items():
        prompt = Prompt(case.preprocessor, text, *files)
        tokens, logprobs, _ = engine.answer(prompt)
        assert agrees(case, prompt, tokens, logprobs), text
        answers.append(tokens)
    # The pictures matter.
    other = Prompt(case.preprocessor, "What is IMAGE here?", SECOND)
    _, logprobs, _ = engine.answer(other)
    first = Prompt(case.preprocessor, "What is IMAGE here?", FIRST)
    assert not agrees(case, first, answers[0], logprobs)
    engine.end()


def test_a_cut_prefill_a_hit_and_a_mixed_batch_give_the_same(case: Case) -> None:
    engine = VisionEngine(case.folder, chunked_prefill_size=16)
    prompt = Prompt(case.preprocessor, "Compare IMAGE with IMAGE now, please", FIRST, SECOND)
    text = Prompt(case.preprocessor, "The quick brown fox jumps over the lazy dog. " * 2)
    rids = engine.send(prompt), engine.send(text)
    engine.run()
    for rid, each in zip(rids, (prompt, text), strict=True):
        assert agrees(case, each, engine.found[rid][0], engine.logprobs[rid])
    tokens, logprobs, cached = engine.answer(prompt)
    assert agrees(case, prompt, tokens, logprobs)
    assert engine.encodings.images_total == 2
    # A prefix of a model with recurrent states needs a state where it ends.
    assert cached >= len(prompt.ids) - 8 or engine.engine._runner.states is not None
    # Another picture at the same place shares only the text before it.
    other = Prompt(case.preprocessor, "Compare IMAGE with IMAGE now, please", SECOND, SECOND)
    tokens, logprobs, cached = engine.answer(other)
    assert agrees(case, other, tokens, logprobs) and cached <= other.images[0].start
    assert engine.encodings.images_total == 2
    engine.end()
