"""Models of packed weights of few bits: what AWQ, GPTQ and compressed-tensors write is served as
the numbers that it stands for.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_models import CASES, PackedModel, written
from transformers import AutoModelForCausalLM

from piecework.kernels.cpu.native.linear import layout_name, native_linear
from piecework.kernels.cpu.native.step import is_known
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.layers.linear import Linear, StoredTensor
from piecework.runtime.llm import LLM
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.llama import LlamaForCausalLM
from piecework.runtime.quantization.methods import linear_kinds

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return written(tmp_path_factory.mktemp("model"), request.param)


def prompt_logprobs(path: Path, prompt: list[int], **settings: Any) -> torch.Tensor:
    llm = LLM(str(path), max_total_tokens=512, num_threads=1, **settings)
    params = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=0)
    (done,) = llm.generate([prompt], params)
    return torch.tensor([entry.logprob for entry in (done.prompt_logprobs or [])[1:] if entry])


PROMPT = [(31 + 7 * j * j) % 500 for j in range(40)]


def test_log_probabilities_are_those_of_the_dequantised_weights(model: PackedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model.reference, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    said = prompt_logprobs(model.path, PROMPT, dtype="float32")
    assert (said - expected).abs().max() < 1e-3


def linears(loaded: LlamaForCausalLM) -> dict[str, Linear]:
    return {name: module for name, module in loaded.named_modules() if isinstance(module, Linear)}


def load(path: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> LlamaForCausalLM:
    kernels = native_linear() if dtype == torch.bfloat16 else None
    settings = {"kernels": kernels, "quantization": "auto"} | settings
    return load_model(str(path), dtype, CPU, False, **settings)


def test_packed_layers_give_what_their_numbers_say(model: PackedModel) -> None:
    exact = linears(load(model.reference, torch.float32))
    for name, layer in linears(load(model.path)).items():
        x = torch.randn(5, layer.in_features).bfloat16()
        expected = exact[name](x.float())
        assert torch.allclose(layer(x).float(), expected, rtol=2.0**-6, atol=0.03), name


def test_widened_layers_have_their_numbers(model: PackedModel) -> None:
    widened = linears(load(model.path, torch.float32, quantization="none"))
    for name, layer in linears(load(model.reference, torch.float32)).items():
        assert torch.allclose(widened[name].weight, layer.weight, rtol=1e-6, atol=1e-7), name


def test_a_hollow_model_has_the_shapes_of_the_loaded_one(model: PackedModel) -> None:
    for dtype, kernels in ((torch.bfloat16, native_linear()), (torch.float32, None)):
        loaded = load(model.path, dtype)
        hollow = hollow_model(loaded.config, dtype, CPU, kernels, linear_kinds(loaded))
        described = [
            {
                name: (tensor.shape, tensor.stride(), tensor.dtype, type(tensor))
                for name, tensor in each.state_dict(keep_vars=True).items()
            }
            for each in (hollow, loaded)
        ]
        assert described[0] == described[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_words_of_one_layer_at_a_time_are_in_memory(
    model: PackedModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive = StoredTensor.read, []

    def reading(stored: StoredTensor) -> torch.Tensor:
        values = read(stored)
        if stored.name.endswith(("qweight", "weight_packed")):
            block = stored.name.rpartition("_proj.")[0].rpartition(".")[0]
            assert {other for other, words in alive if words() is not None} <= {block}
            alive.append((block, weakref.ref(values)))
        return values

    monkeypatch.setattr(StoredTensor, "read", reading)
    load(model.path, dtype)
    assert len(alive) >= 21


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("awq", "Q4_1"),
        ("awq-bias", None),
        ("gptq-8-rows-head", "Q8_0"),
        ("pack-8-asymmetric", None),
    ],
)
def test_the_cpu_packs_what_its_panels_hold(case: str, layout: str | None, tmp_path: Path) -> None:
    layers = linears(load(written(tmp_path, case).path))
    head = layers.pop("lm_head")
    found = {layer.layout for layer in layers.values()}
    assert {each and layout_name(each) for each in found} == {layout}
    assert layout_name(head.layout) == ("Q8_0" if "head" in case else "BF16")


EAGER = {"disable_cuda_graph": True}
PIECES = {"piecewise_cuda_graph": True, "piecewise_cuda_graph_compiler": "eager"}


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "case",
    [
        "gptq-act-order",
        # Fewer parts of the same.
        pytest.param("awq-bias", marks=pytest.mark.slow),
        pytest.param("awq", marks=pytest.mark.slow),
        pytest.param("gptq-8-rows-head", marks=pytest.mark.slow),
    ],
)
def test_graphs_on_and_off_agree(case: str, tmp_path: Path) -> None:
    """Eagerly, in pieces, and, where all is packed, in one native call a decode."""
    model = written(tmp_path, case)
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for settings in (EAGER, PIECES):
        llm = LLM(
            str(model.path), dtype="bfloat16", max_total_tokens=512, num_threads=1, **settings
        )
        outputs = llm.generate(prompts, params)
        found.append([[entry.logprob for entry in output.logprobs] for output in outputs])
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), atol=0.05)


@pytest.mark.parametrize("case", ["gptq", "gptq-act-order", "awq-bias"])
def test_one_native_call_decodes_what_is_packed_in_any_order(case: str, tmp_path: Path) -> None:
    loaded = load(written(tmp_path, case).path)
    assert is_known(loaded, loaded.kv_layouts(torch.bfloat16)) == (case != "awq-bias")


@pytest.mark.slow
def test_compiled_pieces_bring_columns_into_order(tmp_path: Path) -> None:
    """With 16 bits of activations: compiled pieces keep more digits, and of these other bytes would
    be made, which in so small a model are as far from the exact numbers as from one another.
    """
    path = written(tmp_path, "gptq-act-order").path
    compiled = PIECES | {"piecewise_cuda_graph_compiler": "inductor"}
    said = [
        prompt_logprobs(path, PROMPT, dtype="bfloat16", cpu_activations="bf16", **settings)
        for settings in (EAGER, compiled)
    ]
    assert (said[0] - said[1]).abs().mean() < 0.05
