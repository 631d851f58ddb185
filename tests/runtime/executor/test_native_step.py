"""Decodes in one native call give what the model gives op by op, for every architecture and batch
size.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_steps import PAGE, Case
from native_variants import built, native_variants
from quantized_checkpoints import make_fp8
from tiny_models import make_tiny_model

from piecework.kernels import ops
from piecework.kernels.cache_format import CACHE_DTYPES
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native import ops as native_ops
from piecework.kernels.cpu.native.attention import has_cache
from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.native.step import NativeCall, NativeStep, is_known
from piecework.kernels.step_parts import DRAW, Choosing
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core import batch
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.build import build_engine
from piecework.runtime.graphs import graph_runner
from piecework.runtime.llm import LLM
from piecework.runtime.loader.loader import load_model
from piecework.runtime.quantization.methods import named_linears
from piecework.runtime.sampling.grammar import from_regex
from piecework.runtime.sampling.logits_processors import processors_for
from piecework.runtime.sampling.sampler import choose, draws_of

SHAPES: list[dict[str, Any]] = [
    {"architecture": "llama"},
    {
        "architecture": "llama",
        "num_key_value_heads": 1,
        "hidden_size": 52,
        "head_dim": 26,
        "intermediate_size": 96,
    },
    {"architecture": "mistral", "sliding_window": 20},
    {"architecture": "qwen2", "tie_word_embeddings": True},
    {"architecture": "qwen3"},
    {"architecture": "qwen3", "quantization": "int8"},
    {"architecture": "llama", "intermediate_size": 1152, "quantization": "int8"},
    {"architecture": "llama", "quantization": "fp8"},
]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    shape = dict(request.param)
    quantization = shape.pop("quantization", "none")
    return Case(make_tiny_model(tmp_path_factory.mktemp("native"), **shape), quantization)


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 0)],
        [(1, 1100)],
        [(1, 15 + 3 * i) for i in range(7)],
        [(1, 40)] * 20,
        [(1, i % 15) for i in range(64)],
        [(5, 20), (1, 16)],
    ],
)
def test_it_is_the_forward_op_by_op(
    case: Case, lens: list[tuple[int, int]], variant: build.Variant
) -> None:
    (eager, eager_cache), (native, cache) = case.eager(lens), case.native(lens, variant)
    assert (native.log_softmax(-1) - eager.log_softmax(-1)).abs().mean() < case.loss
    # The first layer sees the same numbers: its keys are equal but for the order of sums.
    assert torch.allclose(cache[0, 0].float(), eager_cache[0, 0].float(), atol=0.03, rtol=0.02)
    assert (cache.float() - eager_cache.float()).abs().mean() < case.loss / 30


@pytest.mark.parametrize("threads", [2, 7])
def test_any_number_of_threads_gives_the_same_bits(case: Case, threads: int) -> None:
    """More than cores too: whoever waits for one leaves its work to others."""
    before, found = torch.get_num_threads(), []
    for number in (1, threads):
        torch.set_num_threads(number)
        found.append(case.native([(1, 15 + 3 * i) for i in range(7)], native_variants()[0]))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_so_it_is_over_a_cache_in_8_bits(
    case: Case, kv_cache_dtype: str, variant: build.Variant
) -> None:
    lens = [(1, 250), (1, 0), (1, 15), (5, 20)]
    eager, pool = case.in_bytes(kv_cache_dtype), case.in_bytes(kv_cache_dtype)
    library = built(variant)
    assert has_cache(library, CACHE_DTYPES[kv_cache_dtype])
    step = NativeStep(library, case.model, pool.layouts, pool.k, pool.v)
    expected = case.logits(lens, eager).log_softmax(-1)
    native = case.model.compute_logits(step.call(*case.step(lens)).hidden()).log_softmax(-1)
    assert (native - expected).abs().mean() < case.loss
    # The first layer sees the same numbers: what is stored differs where sums round otherwise.
    same = pool.k[0].view(torch.uint8) == eager.k[0].view(torch.uint8)
    assert same.float().mean() > 0.99 and pool.k[0].view(torch.uint8).any()


@pytest.fixture(scope="module")
def clipping(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model in FP8 with scales of its own for activations, so small that many become the
    largest number.
    """
    folder = make_fp8(tmp_path_factory.mktemp("static"), block=False, static=True)
    case = Case(folder, "auto")
    for _, linear in named_linears(case.model):
        if linear.input is not None and linear.input.scale is not None:
            linear.input.scale.mul_(2.0**-5)
    return case


@pytest.mark.parametrize("variant", native_variants(), ids=lambda variant: variant.name)
def test_activations_are_quantised_by_the_checkpoints_scale(
    clipping: Case, variant: build.Variant
) -> None:
    lens = [(1, 15 + 3 * i) for i in range(7)]
    (eager, _), (native, _) = clipping.eager(lens), clipping.native(lens, variant)
    assert (native.log_softmax(-1) - eager.log_softmax(-1)).abs().mean() < clipping.loss


@pytest.mark.parametrize("way", [0, 1, 2], ids=["floats", "dots", "halves"])
@pytest.mark.parametrize("lens", [[(1, 40)] * 20, [(1, i % 15) for i in range(64)]])
def test_every_way_of_products_is_the_forward_op_by_op(
    case: Case, lens: list[tuple[int, int]], way: int
) -> None:
    """`Way` of linear.h, of which a CPU takes the fastest."""
    best = native_variants()[0]
    if not built(best).piecework_choose_way(way):
        pytest.skip("this CPU lacks it")
    try:
        native, cache = case.native(lens, best)
    finally:
        built(best).piecework_choose_way(-1)
    eager, eager_cache = case.eager(lens)
    assert (native.log_softmax(-1) - eager.log_softmax(-1)).abs().mean() < case.loss
    assert (cache.float() - eager_cache.float()).abs().mean() < case.loss / 30


@pytest.fixture
def as_floats() -> Iterator[None]:
    """Products of many rows as floats: the fastest way is measured, and some need many rows, so
    that a row's bits depend on how many rows are beside it.
    """
    library = built(native_variants()[0])
    library.piecework_choose_way(0)
    yield
    library.piecework_choose_way(-1)


@pytest.mark.usefixtures("as_floats")
@pytest.mark.parametrize("lens", [[(1, 40)], [(1, 15 + 3 * i) for i in range(7)], [(1, 9)] * 30])
def test_the_likeliest_tokens_are_those_of_the_logits(
    case: Case, lens: list[tuple[int, int]]
) -> None:
    """The first of those that are alike, and none of a row whose logits are not finite."""
    pool, step = case.filled(), case.step(lens)
    kernels = NativeStep(built(native_variants()[0]), case.model, pool.layouts, pool.k, pool.v)
    logits = case.model.compute_logits(kernels.call(*step).hidden())
    rows = torch.arange(0, len(lens), 3)
    found = kernels.call(*step, rows).logits()
    assert found is not None and torch.equal(found, logits[rows])
    rows = torch.arange(len(lens))
    chosen = kernels.call(*step, rows).tokens()
    assert chosen is not None and chosen == logits.argmax(-1).tolist()
    # A key of one request that is NaN reaches its row alone.
    pool.k[0][int(step[2].block_table[0, lens[0][1] // PAGE])] = torch.nan
    broken = kernels.call(*step, rows).tokens()
    assert broken is not None and broken[0] == -1 and broken[1:] == chosen[1:]


def test_tokens_are_drawn_as_the_sampler_draws_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_versions", {"cpu": native_ops})
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.05},
    ]
    lens = [(1, i % 15) for i in range(40)]
    requests = [
        Request(
            GenerateRequest(
                rid=str(row),
                input_ids=[1] * (past + 1),
                params=SamplingParams(**asked[row % len(asked)]),
            ),
            seed=row,
            stop_ids=frozenset(),
            max_tokens=99,
            make_processors=processors_for,
        )
        for row, (_, past) in enumerate(lens)
    ]
    pool, step, rows = case.filled(), case.step(lens), torch.arange(len(lens))
    kernels = NativeStep(built(native_variants()[0]), case.model, pool.layouts, pool.k, pool.v)
    logits = kernels.call(*step, rows).logits()
    drawn = kernels.call(*step, rows, draws_of(requests)).tokens()
    assert logits is not None and drawn is not None
    assert drawn != logits.argmax(-1).tolist()
    assert drawn == choose(logits.clone(), requests).tolist()
    pool.k[0][int(step[2].block_table[2, 0])] = torch.nan
    broken = kernels.call(*step, rows, draws_of(requests)).tokens()
    assert broken is not None and broken[2] == -1 and broken[3:] == drawn[3:]


def test_a_call_reads_its_tensors_again(case: Case) -> None:
    library = built(native_variants()[0])
    pool, (ids, positions, metadata) = case.filled(), case.step([(1, 20), (1, 35)])
    kernels = NativeStep(library, case.model, pool.layouts, pool.k, pool.v)
    call = kernels.call(ids, positions, metadata, torch.arange(2))
    before = call.logits()
    ids += 1
    positions += 1
    metadata.slot_mapping.add_(1)
    again = call.logits()
    fresh = NativeStep(library, case.model, pool.layouts, pool.k, pool.v)
    expected = fresh.call(ids.clone(), positions.clone(), metadata, torch.arange(2)).logits()
    assert before is not None and again is not None and expected is not None
    assert torch.equal(again, expected) and not torch.equal(again, before)


def test_a_call_gives_what_it_is_asked_for_whatever_it_gave_before(case: Case) -> None:
    pool, step = case.filled(), case.step([(1, 20), (1, 35)])
    kernels = NativeStep(built(native_variants()[0]), case.model, pool.layouts, pool.k, pool.v)
    rows, draws = torch.arange(2), np.zeros(2, DRAW)
    draws["choosing"], draws["temperature"] = Choosing.PLAIN, 2.0
    asked = ["tokens", "logits", "hidden", "logits", "tokens", "hidden", "tokens"]
    call = kernels.call(*step, rows, draws)
    for each in asked:
        found, fresh = (getattr(one, each)() for one in (call, kernels.call(*step, rows, draws)))
        assert found is not None
        assert found == fresh if each == "tokens" else torch.equal(found, fresh)


def test_others_than_int64_are_refused(case: Case) -> None:
    pool, (ids, positions, metadata) = case.filled(), case.step([(1, 20), (1, 35)])
    kernels = NativeStep(built(native_variants()[0]), case.model, pool.layouts, pool.k, pool.v)
    rows = torch.arange(2)
    for wrong in (
        (ids.int(), positions, metadata, rows),
        (ids, positions.int(), metadata, rows),
        (ids, positions, replace(metadata, slot_mapping=metadata.slot_mapping.int()), rows),
        (ids, positions, metadata, rows.int()),
    ):
        with pytest.raises(AssertionError):
            kernels.call(*wrong)


def test_other_models_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="needs a bfloat16 model"):
        LLM(
            str(path),
            dtype="float32",
            cuda_graph_backend_decode="native",
            max_total_tokens=1024,
            context_length=128,
        )
    load = partial(load_model, device=torch.device("cpu"), progress=False)

    def known(path: Path, dtype: torch.dtype, **options: Any) -> bool:
        model = load(str(path), dtype, **options)
        return is_known(model, model.kv_layouts(dtype))

    assert not known(path, torch.float32)
    assert not known(path, torch.bfloat16)
    assert known(path, torch.bfloat16, kernels=native_linear())
    # Gates and ups would share a panel.
    odd = make_tiny_model(tmp_path / "odd", intermediate_size=80)
    assert not known(odd, torch.bfloat16, kernels=native_linear())


def test_a_model_whose_layers_have_other_heads_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    model = load_model(str(path), torch.bfloat16, torch.device("cpu"), False, native_linear())
    same = model.kv_layouts(torch.bfloat16)
    assert is_known(model, [replace(same[0], window=9), *same[1:]])
    for other in ({"num_kv_heads": 1}, {"value_size": same[0].value_size * 2}):
        assert not is_known(model, [replace(same[0], **other), *same[1:]])


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each native step, as they come."""
    if not build.runnable_variants()[0].needs:
        pytest.skip("decodes run op by op on this CPU")
    sizes, compute = [], NativeCall._compute

    def counted(self: NativeCall, *given: Any, **asked: Any) -> None:
        sizes.append(self._step.tokens)
        compute(self, *given, **asked)

    monkeypatch.setattr(NativeCall, "_compute", counted)
    return sizes


SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_total_tokens": 4096,
    "context_length": 128,
    "num_threads": 1,
    "speculative_algorithm": "none",
}


def test_steps_of_an_engine_go_through_it(tmp_path: Path, sizes: list[int]) -> None:
    path = make_tiny_model(tmp_path)
    native = {"cuda_graph_backend_decode": "native", **SETTINGS}
    prompts = [[5, 6, 7 + i] for i in range(40)]
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=1)
    ours = LLM(str(path), **native).generate(prompts[:3], params)
    assert sizes == [9] + [3] * 5
    eager = LLM(str(path), disable_cuda_graph=True, **SETTINGS).generate(prompts[:3], params)
    assert sizes == [9] + [3] * 5
    for one, other in zip(ours, eager, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
    LLM(str(path), **native).generate(prompts, params)
    assert max(sizes) <= NativeStep.max_tokens


def test_a_batch_that_stays_gives_the_tokens_of_one_laid_out_anew(
    tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ends of pages and of requests, and beside others that draw otherwise."""
    llm = LLM(str(make_tiny_model(tmp_path)), disable_radix_cache=True, **SETTINGS)
    prompts = [[5, 6, 7 + number] for number in range(6)]
    kept, drawn = [], []
    go_on, draws_of = batch._Decodes.go_on, graph_runner.draws_of

    def counted(self: Any, scheduled: list[Any]) -> bool:
        kept.append(go_on(self, scheduled))
        return kept[-1]

    def told(requests: list[Any]) -> Any:
        drawn.append(len(requests))
        return draws_of(requests)

    def answers(first_seed: int) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0.0 if number == 2 else 1.5,
                top_p=0.9 if number % 2 else 1.0,
                seed=first_seed + number,
                max_new_tokens=12 + 7 * number,
                ignore_eos=True,
            )
            for number in range(len(prompts))
        ]
        return [each.token_ids for each in llm.generate(prompts, params)]

    monkeypatch.setattr(batch._Decodes, "go_on", counted)
    monkeypatch.setattr(graph_runner, "draws_of", told)
    found = [answers(1), answers(50)]
    assert sum(kept) > 60 and len(drawn) < 25 and found[0] != found[1]
    monkeypatch.setattr(batch, "_go_on_alike", lambda batch: False)
    assert [answers(1), answers(50)] == found and len(drawn) > 80


def test_an_engine_at_rest_keeps_no_request_that_is_done(tmp_path: Path, sizes: list[int]) -> None:
    config = EngineConfig(model_path=str(make_tiny_model(tmp_path)), device="cpu", **SETTINGS)
    core, runner, startup = build_engine(config, progress=False)
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=6, ignore_eos=True)
    core.add(GenerateRequest(rid="r", input_ids=[5, 6, 7], params=params))
    while core.has_work:
        core.step()
    assert sizes and runner.layout._decodes is not None
    request = weakref.ref(runner.layout._decodes.batch.samplers[0])
    runner.rest()
    gc.collect()
    assert request() is None
    startup.stop()


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "llama", "quantization": "q8_0"},
        {"architecture": "mistral", "sliding_window": 20, "quantization": "q4_0"},
        {"architecture": "qwen2", "tie_word_embeddings": True},
        {"architecture": "qwen3", "quantization": "int8"},
        {"architecture": "qwen3", "quantization": "fp8"},
        {"architecture": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
        {"architecture": "glm4", "head_dim": 32},
        {"architecture": "phi3", "partial_rotary_factor": 0.5},
        {"architecture": "olmo2"},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_short_prompts_have_the_bits_of_the_forward_op_by_op(
    shape: dict[str, Any], tmp_path: Path, sizes: list[int]
) -> None:
    quantization = shape.pop("quantization", "none")
    path = make_tiny_model(tmp_path, **shape)
    settings = SETTINGS | {"quantization": quantization, "disable_radix_cache": True}
    params = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=3, prompt_logprobs=3)
    prompts = [[(7 * length + 3 * i) % 400 for i in range(length)] for length in (1, 2, 17, 64)]
    native, eager = (
        [vars(llm.generate([prompt], params)[0]) for prompt in prompts]
        for llm in (
            LLM(str(path), **settings),
            LLM(str(path), disable_cuda_graph=True, **settings),
        )
    )
    assert sizes == [1, 2, 17, 64] and native == eager


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("gemma", {"head_dim": 32}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_those_of_models_with_gelu_or_experts_go_op_by_op(
    architecture: str, shape: dict[str, Any], tmp_path: Path, sizes: list[int]
) -> None:
    llm = LLM(str(make_tiny_model(tmp_path, architecture, **shape)), **SETTINGS)
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    llm.generate([[5, 6, 7, 8]], params)
    assert sizes == [1, 1]


def test_so_do_tokens_that_a_grammar_forces(tmp_path: Path, sizes: list[int]) -> None:
    llm = LLM(str(make_tiny_model(tmp_path)), **SETTINGS)
    grammar = from_regex("[0-9] sold clips [0-9] sold clips [0-9]")
    params = [SamplingParams(seed=1, max_new_tokens=64, grammar=each) for each in (grammar, None)]
    constrained, _ = llm.generate(["Say: ", "Say what: "], params)
    assert sizes[1] > 2 and constrained.text.count(" sold clips ") == 2


def test_so_do_a_few_tokens_of_a_prompt_beside_decodes(tmp_path: Path, sizes: list[int]) -> None:
    llm = LLM(str(make_tiny_model(tmp_path)), chunked_prefill_size=64, **SETTINGS)
    # The short prompt goes first, the long one in parts beside its decodes.
    llm.generate([[3, 5, 7], list(range(70))], SamplingParams(temperature=0.0, max_new_tokens=3))
    assert sizes[0] == 3 and any(1 < size <= 64 for size in sizes[1:])
