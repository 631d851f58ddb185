"""The real SmolLM2-135M from its GGUF file, against transformers on the same dequantised
weights.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_weights import loaded_weights
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.files.resolve import resolve_model_path
from piecework.runtime.llm import LLM
from piecework.runtime.loader.loader import load_model

TEXTS = [
    "Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many "
    "clips in May. "
    "How many clips did Natalia sell altogether in April and May?\nAnswer: Natalia sold 48/2 = 24 "
    "clips in May.\n"
    "Natalia sold 48+24 = 72 clips altogether in April and May.\n#### 72",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    "
    "return a\n",
    "Die Würde des Menschen ist unantastbar. 你好,世界! 1234567890",
]


@pytest.fixture(scope="module")
def path() -> str:
    try:
        return resolve_model_path("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))


def reference(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """transformers' Llama with the values that the file holds. The numbers are those of the model's
    published config.json.
    """
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    # Built in the dtype, not cast to it: a cast would round the rotary frequencies too.
    with no_init_weights():  # at random, which takes seconds
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    # The head is the embedding, and has no weight of its own in the file.
    assert model.load_state_dict(weights, strict=False) == (["lm_head.weight"], [])
    return model.eval()


def said_by(texts: Sequence[str] = TEXTS, **settings: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of the prompts' tokens but the first of each, and the prompts' token
    ids.
    """
    llm = LLM("smollm2-135m", max_total_tokens=1024, num_threads=1, **settings)
    completions = llm.generate(list(texts), SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    said = [
        entry.logprob
        for done in completions
        for entry in (done.prompt_logprobs or [])[1:]
        if entry is not None
    ]
    return torch.tensor(said), [done.prompt_ids for done in completions]


class Transformers:
    """What transformers' model says of texts."""

    def __init__(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._model, self._said = reference(weights, dtype), dict[tuple[int, ...], torch.Tensor]()

    def said(self, prompts: list[list[int]]) -> torch.Tensor:
        return torch.cat([self._of(ids) for ids in prompts])

    def _of(self, ids: list[int]) -> torch.Tensor:
        if tuple(ids) not in self._said:
            with torch.inference_mode():
                expected = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            wanted = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            self._said[tuple(ids)] = wanted
        return self._said[tuple(ids)]


@pytest.fixture(scope="module")
def transformers(path: str) -> dict[torch.dtype, Transformers]:
    weights = loaded_weights(load_model(path, torch.float32, torch.device("cpu"), False))
    return {dtype: Transformers(weights, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize(
    ("settings", "texts", "tolerance"),
    [
        ({"dtype": "float32"}, TEXTS, 1e-3),
        # CPUs without products of bfloat16 take long for it.
        pytest.param(
            *({"dtype": "bfloat16", "attention_backend": "torch"}, TEXTS[2:], 0.02),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32", "bfloat16 in plain torch"],
)
def test_prompt_logprobs_are_those_of_transformers(
    transformers: dict[torch.dtype, Transformers],
    settings: dict[str, Any],
    texts: list[str],
    tolerance: float,
) -> None:
    said, prompts = said_by(texts, **settings)
    wanted = transformers[getattr(torch, settings["dtype"])].said(prompts)
    assert (said - wanted).abs().mean() < tolerance


def test_bfloat16_of_short_texts_is_nearly_as_near_to_float32_as_transformers(
    transformers: dict[torch.dtype, Transformers],
) -> None:
    """Over so few tokens the distance differs between the kernels of CPUs; the slow test below
    holds a thousand tokens to less.
    """
    said, prompts = said_by(TEXTS[1:], quantization="none", cpu_activations="bf16")
    exact, rounded = (
        transformers[dtype].said(prompts) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (said - exact).abs().mean() < 1.3 * (rounded - exact).abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_bfloat16_is_as_near_to_float32_as_transformers_and_8_bits_find_texts_as_likely(
    transformers: dict[torch.dtype, Transformers], quantization: str
) -> None:
    """Two ways to round differ by more than either errs; what counts is the distance from what the
    file's numbers give.

    Over a thousand tokens: the mean of 170 differs by a sixth from one CPU's kernels to another's.
    """
    prose = (Path(__file__).parents[3] / "LICENSE").read_text()
    texts = [*TEXTS, prose[:2500], prose[6000:8500]]
    said, prompts = said_by(texts, quantization=quantization, cpu_activations="bf16")
    exact, rounded = (
        transformers[dtype].said(prompts) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (said - exact).abs().mean() < 1.1 * (rounded - exact).abs().mean()
    if quantization == "auto":
        in_eight_bits, _ = said_by(texts, cpu_activations="int8")
        assert abs((in_eight_bits - said).mean()) < 0.01


PEAK = """
import resource, sys, torch
from piecework.runtime.executor.model_runner import weight_bytes
from piecework.runtime.loader.loader import load_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(sys.argv[1], torch.bfloat16, torch.device("cpu"), False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / weight_bytes(model))
"""


@pytest.mark.slow
def test_loading_needs_little_more_memory_than_the_weights(path: str) -> None:
    """Beside them are in memory: the pages of the file, a third of the weights' size, and what is
    being dequantised.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 2.0


def test_it_answers_a_question(path: str) -> None:
    llm = LLM("smollm2-135m", max_total_tokens=1024, num_threads=1)
    done = llm.chat(
        [{"role": "user", "content": "Name the capital of France."}],
        SamplingParams(temperature=0.0, max_new_tokens=30),
    )
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
