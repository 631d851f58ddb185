"""Decode steps in one native call compute adapters as the ops do, and each request as if it were
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM, Completion

PARAMS = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True, logprobs=1)
NAMES = ["", "n0", "n1", "n2", "n0", ""]
PROMPTS = [[(11 * row + 3 * place) % 500 for place in range(5 + 9 * row)] for row in range(6)]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "narrow": {"num_key_value_heads": 1, "hidden_size": 52, "head_dim": 26},
    "qwen3": {"architecture": "qwen3"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "q8_0": {"quantization": "q8_0"},
    "mixture": {
        "architecture": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> dict[str, Any]:
    shape = dict(request.param)
    quantization = shape.pop("quantization", "auto")
    folder: Path = tmp_path_factory.mktemp("native")
    base = make_tiny_model(folder / "base", **shape)
    adapters = [
        make_adapter(folder / f"{seed}", base, seed=seed, rank=3 + 5 * seed) for seed in range(3)
    ]
    return {
        "model_path": str(base),
        "quantization": quantization,
        "lora_modules": ",".join(f"n{seed}={path}" for seed, path in enumerate(adapters)),
        "max_total_tokens": 2048,
        "num_threads": 2,
        "attention_backend": "native",
    }


def logprobs(results: list[Completion]) -> list[list[tuple[int, float]]]:
    assert all(result.error is None for result in results)
    return [[(each.token_id, each.logprob) for each in result.logprobs] for result in results]


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(settings: dict[str, Any]) -> None:
    try:
        llm = LLM(batch_invariant=True, **settings)
    except ValueError as error:
        pytest.skip(str(error))
    mixed = logprobs(llm.generate(PROMPTS, PARAMS, adapters=NAMES))
    alone = [
        logprobs(llm.generate([prompt], PARAMS, adapters=name))[0]
        for prompt, name in zip(PROMPTS, NAMES, strict=True)
    ]
    assert mixed == alone
    llm.core.check()


def test_steps_give_the_bits_of_the_ops(settings: dict[str, Any]) -> None:
    whole = LLM(**settings)
    if whole.info.graphs.decode_backend != "native":
        pytest.skip("no native decodes here")
    found = logprobs(whole.generate(PROMPTS, PARAMS, adapters=NAMES))
    ops = logprobs(
        LLM(disable_cuda_graph=True, **settings).generate(PROMPTS, PARAMS, adapters=NAMES)
    )
    assert len({tuple(each) for each in found}) == len(found)
    kernels = whole.core._runner.graphs.kernels  # type: ignore[attr-defined]
    if kernels.keeps_bits:
        assert found == ops
    else:
        assert [[token for token, _ in each] for each in found] == [
            [token for token, _ in each] for each in ops
        ]
