"""Each architecture against transformers on tiny random weights, in float32: the same logits
however the tokens are scheduled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.generation import GenerateRequest, TokenLogprob
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.build import build_engine
from piecework.runtime.engine.core import EngineCore
from piecework.runtime.llm import LLM
from tests.runtime.models.sizes import PHI_LONG
from tests.runtime.models.variants import FALLBACKS, LLAMAS, OTHERS, VARIANTS

TOLERANCE = 1e-4
OF_OTHERS = {"olmo_hybrid": 3e-4}
"""By type of model, where the float32 of transformers is less exact. OLMo Hybrid's is up to 2.1e-4
from the same code in float64, and ours up to 4e-5.
"""
SOME = ("phi", "gpt2", "dots1")
"""Of the models that transformers computes, those of the usual run."""
LIKE_OTHERS = (
    *("lfm2-moe", "granite4-moe", "falcon-h1-gate", "qwen3.5-moe", "nemotron-h"),
    "falcon-mamba",
)
"""Whose parts others have, each of which is of the usual run."""


def slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


REST = slow(name for name in FALLBACKS if name not in SOME)
FEW = ("llama", "qwen2-window", "qwen3-tied-bias")
"""What is not of an architecture is shown of these in the usual run."""
CACHES = (
    *("llama", "mistral-window", "qwen2-window", "gemma3", "gemma3n", "deepseek-v3", "llama4"),
    *("lfm2", "granite4", "jamba", "mamba2", "falcon-h1", "zamba2", "qwen3-next", "gpt-oss"),
    *("minimax", "kimi-linear", "deepseek-v3.2", "glm5", "gpt2"),
)
"""One for each kind of cache, and for each layer with a state."""


def usual_of(some: Iterable[str]) -> list[Any]:
    """All variants, of which the usual run has some."""
    return [*some, *slow(name for name in VARIANTS if name not in some)]


PROMPTS = [
    [(31 * i + 7 * j * j) % 500 for j in range(length)] for i, length in enumerate((90, 33, 7, 51))
]


if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    # transformers 5.24 asks Llama 4's text model for a member that its output lacks.
    MoeCausalLMOutputWithPast.image_outputs = None


class Case:
    """One variant: its folder, and transformers' model of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.loads((path / "config.json").read_text())
        rope = content.get("rope_parameters", {})
        self.tolerance = OF_OTHERS.get(content["model_type"], TOLERANCE)
        # Ours turns all texts as the longest that is served, transformers short ones otherwise.
        shortest = 64 if rope.get("rope_type") == "longrope" else 0
        self.prompts = [prompt for prompt in PROMPTS if len(prompt) > shortest]
        kind = AutoModelForImageTextToText if "text_config" in content else AutoModelForCausalLM
        # transformers' eager code adds Falcon's ALiBi twice.
        attention = "sdpa" if content["model_type"] == "falcon" else "eager"
        self.reference = kind.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention
        ).eval()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab]: row p speaks of the token at p + 1."""
        return self.reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    def core(self, **settings: Any) -> EngineCore:
        config = EngineConfig(
            model_path=str(self.path),
            dtype="float32",
            max_total_tokens=4096,
            num_threads=1,
            **settings,
        )
        return build_engine(config, progress=False).core


USUAL = [name for name in OTHERS if name not in LIKE_OTHERS]


@pytest.fixture(scope="module", params=[*LLAMAS, *USUAL, *slow(LIKE_OTHERS), *SOME, *REST])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, overrides = VARIANTS[request.param]
    return Case(make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides))


def run(
    core: EngineCore, prompts: list[list[int]], params: SamplingParams
) -> list[tuple[list[int], list[TokenLogprob | None]]]:
    """Tokens of each prompt, and what the model said of every position: the prompt's, then the
    output's.
    """
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    said: dict[str, list[TokenLogprob | None]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        core.add(
            GenerateRequest(rid=str(i), input_ids=prompt, params=params, arrival_time=float(i))
        )
    while core.has_work:
        for output in core.step().outputs:
            tokens[output.rid] += output.token_ids
            said[output.rid] += (output.prompt_logprobs or []) + (output.logprobs or [])
        core.check()
    return [(tokens[rid], said[rid]) for rid in tokens]


def assert_same(
    case: Case, prompt: list[int], tokens: list[int], said: list[TokenLogprob | None], skip: int = 0
) -> None:
    """Every log-probability that was given, of the token itself and of the likeliest others, is
    transformers'.
    """
    expected = case.logprobs(prompt + tokens)
    for position, entry in enumerate(said, start=skip):
        if entry is not None:
            assert entry.logprob == pytest.approx(
                float(expected[position - 1, entry.token_id]), abs=case.tolerance
            )
            assert [value for _, value in entry.top] == pytest.approx(
                expected[position - 1].topk(len(entry.top))[0].tolist(), abs=case.tolerance
            )


ALL = SamplingParams(
    temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=20, prompt_logprobs=20
)


@pytest.mark.parametrize("case", usual_of(FEW), indirect=True)
def test_prompt_and_output_logprobs(case: Case) -> None:
    assert_said(case, chunk=512)


def test_chunks_beside_decodes_of_others_give_the_same_logprobs(case: Case) -> None:
    assert_said(case, chunk=13)


def assert_said(case: Case, *, chunk: int) -> None:
    """A crowd of prompts."""
    for prompt, (tokens, said) in zip(
        case.prompts, run(case.core(chunked_prefill_size=chunk), case.prompts, ALL), strict=True
    ):
        assert len(said) == len(prompt) + 8
        assert_same(case, prompt, tokens, said)


@pytest.mark.parametrize("case", usual_of(CACHES), indirect=True)
def test_a_prefix_hit_gives_the_same_logprobs(case: Case) -> None:
    core = case.core(page_size=4)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=20)
    run(core, PROMPTS[:1], params)
    # Where a prompt's last whole page ends, the state of recurrent layers is kept as well.
    longer = PROMPTS[0] + PROMPTS[1]
    ((tokens, said),) = run(core, [longer], params)
    assert core.stats().cached_tokens_total == 88
    assert_same(case, longer, tokens, said, skip=len(longer))


@pytest.mark.parametrize("case", usual_of(FEW), indirect=True)
def test_greedy_tokens_are_equal_for_64_steps(case: Case) -> None:
    core = case.core()
    params = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    for prompt, (tokens, _) in zip(case.prompts, run(core, case.prompts, params), strict=True):
        expected = case.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("case", usual_of(FEW), indirect=True)
def test_bfloat16_stays_close(case: Case) -> None:
    llm = LLM(str(case.path), dtype="bfloat16", max_total_tokens=512, num_threads=1)
    params = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=0)
    (done,) = llm.generate([PROMPTS[0]], params)
    reference = case.reference.to(torch.bfloat16)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0].float().log_softmax(-1)
    case.reference.to(torch.float32)
    said = torch.tensor(
        [entry.logprob for entry in (done.prompt_logprobs or [])[1:] if entry is not None]
    )
    wanted = expected[:-1].gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    # Weights this large make logits of order 10, whose bf16 step is 0.06.
    assert (said - wanted).abs().mean() < 0.15


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_longrope_takes_its_short_factors_where_no_text_is_longer(
    tmp_path: Path, kind: str
) -> None:
    """As transformers does for a text within the original length."""
    settings = {**PHI_LONG, **({"num_local_experts": 4} if kind == "phimoe" else {})}
    factors = {"short_mscale": 1.2, "long_mscale": 1.4} if kind == "phimoe" else {}
    settings["rope_scaling"] = {**PHI_LONG["rope_scaling"], **factors}
    case = Case(make_tiny_model(tmp_path, kind, **settings))
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 50]
    for prompt, (tokens, said) in zip(
        prompts, run(case.core(context_length=64), prompts, ALL), strict=True
    ):
        assert_same(case, prompt, tokens, said)


def test_mpt_may_have_biases_and_its_first_name(tmp_path: Path) -> None:
    """transformers' code of it has none, whatever config.json says."""
    path = make_tiny_model(tmp_path, "mpt")
    case, tensors = Case(path), load_file(path / "model.safetensors")
    for name, module in case.reference.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) and name != "lm_head":
            module.bias = nn.Parameter(0.3 * torch.randn(len(module.weight)))
            tensors[f"{name}.bias"] = module.bias.detach()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    told = {"no_bias": False, "architectures": ["MPTForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config | told))
    ((tokens, said),) = run(case.core(), PROMPTS[1:2], ALL)
    assert_same(case, PROMPTS[1], tokens, said)


@pytest.mark.parametrize("bias", [False, True])
def test_internlm3_is_a_llama_with_other_biases(tmp_path: Path, bias: bool) -> None:
    """transformers has no code of it."""
    path = make_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=bias)
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        if name.endswith("o_proj.bias") and not bias:
            tensors[name].zero_()
    save_file(tensors, path / "model.safetensors")
    case = Case(path)
    if not bias:
        kept = {name: each for name, each in tensors.items() if not name.endswith("o_proj.bias")}
        save_file(kept, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    names = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    (path / "config.json").write_text(json.dumps(config | names | {"qkv_bias": True, "bias": bias}))
    ((tokens, said),) = run(case.core(), PROMPTS[1:2], ALL)
    assert_same(case, PROMPTS[1], tokens, said)
