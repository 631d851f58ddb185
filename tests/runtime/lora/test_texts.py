"""A model with adapters gives what transformers' model gives with the adapters in its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_adapters import logprobs_after, make_adapter, merged_model
from tiny_models import make_tiny_model

from piecework.runtime.core.generation import FinishReason
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM, Completion

PROMPT = [5, 6, 7, 8, 9, 10]
PARAMS = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, logprobs=0)
SETTINGS = {"dtype": "float32", "max_total_tokens": 4096, "num_threads": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(folder / f"{seed}", base, seed=seed, rank=2 + seed, **members)
        for seed, members in enumerate(
            (
                {},
                {"use_rslora": True},
                {
                    "rank_pattern": {r"layers\.1\..*": 9, "down_proj": 1},
                    "alpha_pattern": {"q_proj": 3},
                },
                {"choose": lambda name: "v_proj" in name or "layers.2.mlp.up" in name},
            )
        )
    ]


@pytest.fixture(scope="module")
def llm(base: Path, adapters: list[Path]) -> LLM:
    named = ",".join(f"n{number}={path}" for number, path in enumerate(adapters))
    # Fewer slots than adapters.
    return LLM(str(base), lora_modules=named, max_loras=2, **SETTINGS)


def check(result: Completion, base: Path, adapter: Path | None, prompt: list[int]) -> None:
    assert result.finish_reason is FinishReason.LENGTH, result.error
    wanted = logprobs_after(merged_model(base, adapter), prompt, result.token_ids)
    assert result.token_ids == wanted.argmax(-1).tolist()
    given = torch.tensor([each.logprob for each in result.logprobs])
    assert torch.allclose(given, wanted.amax(-1), atol=2e-3)


def test_one_batch_has_several_adapters_and_the_base_model(
    llm: LLM, base: Path, adapters: list[Path]
) -> None:
    names = ["", "n0", "n1", "n2", "n3", "n1", ""]
    results = llm.generate([PROMPT] * len(names), PARAMS, adapters=names)
    for name, result in zip(names, results, strict=True):
        check(result, base, adapters[int(name[1:])] if name else None, PROMPT)
    assert len({tuple(result.token_ids) for result in results}) == 5
    llm.core.check()


def test_prefixes_are_shared_within_an_adapter_only(
    llm: LLM, base: Path, adapters: list[Path]
) -> None:
    prompt = list(range(100, 150))
    first, *others = (
        llm.generate([prompt], PARAMS, adapters=name)[0] for name in ("n0", "n1", "", "n0")
    )
    assert [first.cached_tokens, *(each.cached_tokens for each in others)] == [0, 0, 0, 48]
    check(others[2], base, adapters[0], prompt)
    llm.core.check()


def test_long_prompts_in_chunks_and_few_pages(base: Path, adapters: list[Path]) -> None:
    """Requests are preempted, and prompts are computed in chunks beside decodes of others."""
    settings = SETTINGS | {"max_total_tokens": 96, "chunked_prefill_size": 16, "page_size": 4}
    named = ",".join(f"n{number}={path}" for number, path in enumerate(adapters))
    llm = LLM(str(base), lora_modules=named, max_loras=2, **settings)
    prompts = [[(7 * place + row) % 500 for place in range(40)] for row in range(4)]
    names = ["n0", "n2", "", "n0"]
    results = llm.generate(prompts, PARAMS, adapters=names)
    assert llm.core.stats().preemptions_total > 0
    for name, prompt, result in zip(names, prompts, results, strict=True):
        check(result, base, adapters[int(name[1:])] if name else None, prompt)
    llm.core.check()


def test_an_adapter_that_peft_writes(base: Path, llm: LLM, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = merged_model(base, None)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, lora_alpha=16
    )
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "own")
    llm.load_adapter("own", str(tmp_path / "own"))
    (result,) = llm.generate([PROMPT], PARAMS, adapters="own")
    wanted = logprobs_after(adapted, PROMPT, result.token_ids)
    assert result.token_ids == wanted.argmax(-1).tolist()
    given = torch.tensor([each.logprob for each in result.logprobs])
    assert torch.allclose(given, wanted.amax(-1), atol=2e-3)
