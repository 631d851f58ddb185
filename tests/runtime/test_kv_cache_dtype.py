"""Models over a KV cache in 8 bits: the same engine, about the same answers, twice the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse import sparse
from tiny_models import make_tiny_model

from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.memory_info import MemoryInfo
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.executor import model_runner
from piecework.runtime.llm import LLM

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8")
PROMPTS = [[5, 6, 7], list(range(20, 120)), [9], list(range(20, 90))]
TEXT = (
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes "
    "muffins for her friends every day with four. She sells the remainder at the market for $2 an "
    "egg. How much does she make every day? She makes 9 * 2 = $18 every day at the market."
)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def make(model: Path, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 1024,
        "context_length": 160,
        "disable_cuda_graph": True,
        "num_threads": 1,
    }
    return LLM(str(model), **defaults | settings)


def generated(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "threads"), [*((name, 1) for name in FORMATS), ("int8", 2)]
)
def test_prompts_in_chunks_and_with_cached_prefixes_give_what_whole_ones_do(
    model: Path, kv_cache_dtype: str, threads: int
) -> None:
    settings = {"kv_cache_dtype": kv_cache_dtype, "num_threads": threads}
    expected = generated(make(model, **settings, disable_radix_cache=True))
    assert generated(make(model, **settings, chunked_prefill_size=16)) == expected
    shared = make(model, **settings)
    assert generated(shared) == expected and generated(shared) == expected
    assert shared.core.stats().cached_tokens_total > 0


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_requests_that_wait_for_pages_and_are_computed_again_give_the_same(
    model: Path, kv_cache_dtype: str
) -> None:
    prompts = [[3 + i, 4, 5] for i in range(4)]
    params = replace(GREEDY, max_new_tokens=40)
    found = {}
    for tokens in (1024, 96):
        llm = make(model, kv_cache_dtype=kv_cache_dtype, max_total_tokens=tokens, page_size=4)
        found[tokens] = [each.token_ids for each in llm.generate(prompts, params)]
    assert found[96] == found[1024] and llm.core.stats().preemptions_total > 0


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_recorded_decodes_give_what_eager_ones_do(model: Path, kv_cache_dtype: str) -> None:
    settings = {"kv_cache_dtype": kv_cache_dtype, "attention_backend": "torch"}
    expected = generated(make(model, **settings))
    recorded = make(
        model,
        **settings,
        disable_cuda_graph=False,
        piecewise_cuda_graph=False,
        cuda_graph_backend_decode="full",
        cuda_graph_bs="4",
        startup="full",
    )
    assert generated(recorded) == expected
    assert recorded.core.stats().graph_replays_total > 0


def test_the_same_memory_holds_about_twice_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryInfo(free=2**22, total=2**22)
    monkeypatch.setattr(CpuPlatform, "memory", lambda self: memory)
    settings = {"dtype": "bfloat16", "max_total_tokens": None, "mem_fraction_static": 0.2}
    tokens = {
        name: make(model, **settings, kv_cache_dtype=name).info for name in ("auto", *FORMATS)
    }
    plain = tokens["auto"].kv_tokens
    for name in FORMATS:
        assert tokens[name].kv_cache_dtype == name
    assert tokens["fp8_e4m3"].kv_tokens >= 1.9 * plain
    assert tokens["int8"].kv_tokens >= 1.5 * plain


def test_a_device_whose_attention_lacks_it_is_told_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "kv_cache_dtypes", ("int8",))
    monkeypatch.setattr(model_runner, "load_model", pytest.fail)
    with pytest.raises(
        ValueError, match="--kv-cache-dtype fp8_e4m3 is not available on cpu, which"
    ):
        make(model, kv_cache_dtype="fp8_e4m3")


def said(llm: LLM, prompt: list[int] | str) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0, logprobs=0)
    (found,) = llm.generate([prompt], params)
    assert found.prompt_logprobs is not None
    return torch.tensor([each.logprob for each in found.prompt_logprobs if each is not None])


def test_log_probabilities_are_near_those_of_16_bits(model: Path) -> None:
    """Weights at random make the most of each error; int8 has five bits more than e5m2."""
    prompt = [(31 * i) % 500 for i in range(100)]
    plain = said(make(model), prompt)
    for name, bound in {"fp8_e4m3": 0.35, "fp8_e5m2": 0.7, "int8": 0.07}.items():
        found = (said(make(model, kv_cache_dtype=name), prompt) - plain).abs().mean()
        assert 0 < found < bound, name


def smollm2_says(kv_cache_dtype: str) -> tuple[torch.Tensor, str]:
    """Of a text's tokens, and after it; by the kernels that serve it, prefill and native
    decodes.
    """
    settings = {"dtype": "bfloat16", "disable_cuda_graph": False, "piecewise_cuda_graph": False}
    llm = make(Path("smollm2-135m"), **settings, kv_cache_dtype=kv_cache_dtype)
    (answer,) = llm.generate(["The capital of France is"], replace(GREEDY, max_new_tokens=4))
    return said(llm, TEXT), answer.text


@pytest.fixture(scope="module")
def plain() -> tuple[torch.Tensor, str]:
    return smollm2_says("auto")


@pytest.mark.parametrize(
    "kv_cache_dtype",
    sparse(FORMATS, kept=["int8"]),
)
def test_smollm2_says_almost_the_same(kv_cache_dtype: str, plain: tuple[torch.Tensor, str]) -> None:
    found, answer = smollm2_says(kv_cache_dtype)
    difference = found - plain[0]
    each, together = {"fp8_e4m3": (0.2, 0.1), "fp8_e5m2": (0.4, 0.15), "int8": (0.12, 0.03)}[
        kv_cache_dtype
    ]
    assert 0 < difference.abs().mean() < each and difference.mean().abs() < together
    assert answer == plain[1]
