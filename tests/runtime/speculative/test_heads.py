"""Heads draft what their formulas say, change no text, and are refused with a remedy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import (
    NextLayerReference,
    eagle3_drafts,
    make_cycle,
    make_eagle3,
    make_with_next_layer,
)
from models.sizes import DELTA, EXPERTS, LATENT
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from piecework import LLM, SamplingParams
from piecework.kernels.cpu.native import build
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.speculative.speculation import _Choice

# The second and the fourth share a prefix, and the longest is computed in several steps.
PROMPTS = [[9, 4, 77], list(range(5, 45)), list(range(300, 420)), [*range(5, 45), 8, 8]]
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
}
# The last layer is the one that predicts one token more.
HYBRID = {**DELTA, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
NEXT = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 80}
Drafts = list[tuple[list[int], list[int]]]


def engine(path: Path, **settings: Any) -> LLM:
    return LLM(
        str(path),
        **{"dtype": "float32", "num_threads": 1, "max_total_tokens": 2048, **settings},
        chunked_prefill_size=48,
    )


def with_eagle3(path: Path, head: Path, **settings: Any) -> LLM:
    return engine(
        path,
        speculative_algorithm="eagle3",
        speculative_draft_model_path=str(head),
        **settings,
    )


def always_draft(llm: LLM, count: int) -> Drafts:
    """Have each step draft `count` tokens for each request. Return the list of what is drafted,
    each after the tokens before it.
    """
    speculation: Any = llm.core._speculation
    drafter, found = speculation._drafter, []
    draft = drafter.draft

    def recorded(running: list[Request], counts: dict[Request, int]) -> Any:
        drafts = draft(running, counts)
        found.extend((request.tokens.tolist(), list(own)) for request, own in drafts.items())
        return drafts

    def choose(running: list[Request]) -> Any:
        able = [each for each in running if each.guesses is not None]
        room = {each: min(count, each.max_tokens - each.num_known - 1) for each in able}
        return _Choice({}, {each: own for each, own in room.items() if own > 0})

    drafter.draft, speculation._choose = recorded, choose
    return found


def run(llm: LLM, prompts: list[list[int]] = PROMPTS, count: int = 12) -> list[list[int]]:
    """Return the likeliest answers. Memory is checked after each step."""
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        own = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        llm.core.add(GenerateRequest(rid=str(number), input_ids=prompt, params=own))
    while llm.core.has_work:
        for output in llm.core.step().outputs:
            found.setdefault(output.rid, []).extend(output.token_ids)
        llm.core.check()
    assert llm.core.stats().kv_tokens_used == 0
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize(
    "draft_vocab",
    [
        pytest.param(None, marks=pytest.mark.slow, id="whole vocabulary"),
        pytest.param(200, id="own vocabulary"),
    ],
)
def test_drafts_of_eagle3_equal_the_formula(tmp_path: Path, draft_vocab: int | None) -> None:
    model = make_tiny_model(tmp_path / "model")
    head = make_eagle3(tmp_path / "head", model, draft_vocab=draft_vocab)
    llm = with_eagle3(model, head)
    found = always_draft(llm, 4)
    answers = run(llm)
    assert answers == run(engine(model, speculative_algorithm="none"))
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    embedding = reference.get_input_embeddings().weight.detach()
    # After a wrong draft there is another one at once.
    assert len(found) > 36
    for tokens, drafts in found:
        with torch.no_grad():
            states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        wanted = eagle3_drafts(head, embedding, [each[0] for each in states[:3]], tokens, 4)
        assert drafts == wanted[: len(drafts)] and len(drafts) > 0


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("deepseek_v3", LATENT),
        pytest.param("glm4_moe", GLM, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", LATENT, marks=pytest.mark.slow),
        ("qwen2", {}),  # As MiMo.
        ("qwen3_next", NEXT),
        pytest.param("qwen3_5_text", HYBRID, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", NEXT, marks=pytest.mark.slow),
    ],
)
def test_drafts_of_the_next_layer_equal_the_formula(
    tmp_path: Path, architecture: str, sizes: dict[str, Any]
) -> None:
    model = make_with_next_layer(tmp_path, architecture, **sizes)
    llm = engine(model, speculative_algorithm="nextn")
    found = always_draft(llm, 3)
    answers = run(llm)
    assert answers == run(engine(model, speculative_algorithm="none"))
    reference = NextLayerReference(model)
    assert len(found) > 36
    for tokens, drafts in found:
        assert drafts == reference.drafts(tokens, 3)[: len(drafts)] and len(drafts) > 0


def test_a_head_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    model, head = make_cycle(tmp_path)
    llm = with_eagle3(model, head, speculative_num_steps=4)
    always_draft(llm, 4)
    prompts = [[3], [5, 9], list(range(40))]
    answers = run(llm, prompts, 41)
    assert answers == run(engine(model, speculative_algorithm="none"), prompts, 41)
    stats = llm.core.stats()
    assert stats.draft_tokens_total == stats.accepted_tokens_total > 60
    assert stats.steps_total < 25


@pytest.mark.skipif(
    not build.runnable_variants()[0].needs, reason="decodes run op by op on this CPU"
)
@pytest.mark.parametrize(("kind", "states"), [("eagle3", 3), ("mimo", 1)])
def test_native_decodes_give_the_states_of_inner_layers(
    tmp_path: Path, kind: str, states: int
) -> None:
    if kind == "eagle3":
        model = make_tiny_model(tmp_path / "model", num_hidden_layers=7)
        make = partial(with_eagle3, model, make_eagle3(tmp_path / "head", model))
    else:
        # It reads what goes into the final norm.
        model = make_with_next_layer(tmp_path, "qwen2")
        make = partial(engine, model, speculative_algorithm="nextn")
    seen: list[list[torch.Tensor]] = []
    for backend in ("native", "disabled"):
        llm = make(dtype="bfloat16", cuda_graph_backend_decode=backend)
        always_draft(llm, 2)
        drafter: Any = llm.core._speculation._drafter  # type: ignore[union-attr]
        own, observe = [], drafter.observe

        def observed(
            scheduled: Any, hidden: torch.Tensor, own: Any = own, to: Any = observe
        ) -> None:
            own.append(hidden.clone())
            to(scheduled, hidden)

        drafter.observe = observed
        run(llm)
        seen.append(own)
    assert len(seen[0]) == len(seen[1]) > 5
    for native, plain in zip(*seen, strict=True):
        assert native.shape[1] == (1 + states) * 64
        assert torch.equal(native, plain)


def _record_states(drafter: Any) -> list[torch.Tensor]:
    states, observe = [], drafter.observe

    def observed(scheduled: Any, hidden: torch.Tensor) -> None:
        states.append(hidden.clone())
        observe(scheduled, hidden)

    drafter.observe = observed
    return states


REFUSED = {
    "another hidden size": ({"hidden_size": 96, "num_attention_heads": 6}, "the model's have 64"),
    "another vocabulary": (
        {"vocab_size": 500},
        "its vocabulary has 512 tokens and the model's 500",
    ),
    "too few layers": ({"num_hidden_layers": 2}, "which a model of 2 layers does not have"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_of_another_model_is_refused(tmp_path: Path, case: str) -> None:
    changes, error = REFUSED[case]
    head = make_eagle3(tmp_path / "head", make_tiny_model(tmp_path / "model"))
    if case == "another hidden size":
        head = make_eagle3(tmp_path / "other", make_tiny_model(tmp_path / "wide", **changes))
        changes = {}
    model = make_tiny_model(tmp_path / "target", **changes)
    with pytest.raises(ValueError, match=error):
        with_eagle3(model, head)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"must have the architecture LlamaForCausalLMEagle3, got"):
        with_eagle3(model, model)
    head = make_eagle3(tmp_path / "head", model, draft_vocab=200)
    weights = load_file(head / "model.safetensors")
    for name, error in (
        ("d2t", "it lacks d2t"),
        ("midlayer.hidden_norm.weight", r"lacks 1 tensors, for example midlayer\.hidden_norm"),
        ("lm_head.weight", r"it lacks lm_head\.weight"),
    ):
        fewer = {key: each for key, each in weights.items() if key != name}
        save_file(fewer, head / "model.safetensors")
        with pytest.raises(ValueError, match=error):
            with_eagle3(model, head)
    beyond = {**weights, "d2t": weights["d2t"] + 400}
    save_file(beyond, head / "model.safetensors")
    with pytest.raises(ValueError, match="d2t names tokens beyond the model's 512"):
        with_eagle3(model, head)


def test_a_model_without_a_next_layer_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "llama")
    with pytest.raises(ValueError, match="predicts further tokens is known for LlamaForCausalLM"):
        engine(model, speculative_algorithm="nextn")
    model = make_tiny_model(tmp_path / "glm", "glm4_moe", **GLM)
    with pytest.raises(ValueError, match=r"holds no tensors model\.layers\.3\.\*"):
        engine(model, speculative_algorithm="nextn")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"speculative_algorithm": "eagle3"}, "needs --speculative-draft-model-path"),
        (
            {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": "x"},
            "leave --speculative-draft-model-path x out",
        ),
        ({"speculative_algorithm": "MTP", "tp_size": 2}, "runs on one rank"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(
    settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        LLM("model", **settings)
