"""Scales of keys and values in float8, as checkpoints bring them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.runtime.loader.loader import load_model

SETTINGS = {"dtype": "float32", "device": "cpu", "max_total_tokens": 512, "context_length": 128}
LAYERS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS)


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    return folder


def scales(folder: Path) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = load_model(
        str(folder), torch.float32, torch.device("cpu"), progress=False, quantization="auto"
    ).kv_scales
    return found


def said(folder: Path, kv_cache_dtype: str) -> list[float]:
    """Log-probabilities of a prompt's tokens."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0, logprobs=0)
    llm = LLM(str(folder), kv_cache_dtype=kv_cache_dtype, **SETTINGS)
    (found,) = llm.generate([[(31 * i) % 500 for i in range(60)]], params)
    assert found.prompt_logprobs is not None
    return [each.logprob for each in found.prompt_logprobs if each is not None]


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_those_that_compressed_tensors_writes(strategy: str, model: Path) -> None:
    """Its own module's tensors, filled with numbers by which they are known."""
    written = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=strategy, dynamic=False)
    config = QuantizationConfig(config_groups={}, kv_cache_scheme=scheme, format="float-quantized")
    apply_quantization_config(written, config, show_progress=False)
    tensors = {
        name: torch.linspace(0.1, 1.0 + int(name.split(".")[2]), tensor.numel()).view_as(tensor)
        for name, tensor in written.state_dict().items()
        if name.endswith(("k_scale", "v_scale"))
    }
    if not tensors:
        pytest.skip("this compressed-tensors finds no attention in this release of transformers")
    assert len(tensors) == 2 * LAYERS
    path = model / "config.json"
    quantization = json.loads(config.model_dump_json(exclude_none=True))
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": quantization})
    )
    largest = [float(tensors[f"model.layers.{i}.self_attn.k_scale"].max()) for i in range(LAYERS)]
    assert scales(with_tensors(model, tensors)) == [(each, each) for each in largest]


def test_other_published_names_and_1_where_there_is_none(model: Path) -> None:
    attention = "model.layers.{}.self_attn.".format
    tensors = {
        attention(0) + "k_proj.k_scale": torch.tensor(0.5),
        attention(0) + "v_proj.v_scale": torch.tensor([0.25]),
        attention(1) + "kv_scale": torch.tensor(2.0, dtype=torch.bfloat16),
        attention(2) + "v_proj.output_scale": torch.tensor(4.0),
    }
    assert scales(with_tensors(model, tensors)) == [(0.5, 0.25), (2.0, 2.0), (1.0, 4.0)]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor(float("nan")), "above 0 and up to 10000, got"),
        (torch.tensor(float("inf")), "above 0 and up to 10000, got"),
        (torch.tensor(0.0), "above 0 and up to 10000, got"),
        (torch.tensor(-1.0), "above 0 and up to 10000, got"),
        (torch.ones(0), "above 0 and up to 10000, got"),
        (torch.ones(2, 2), "is no scale of keys or values"),
        (torch.ones(5000), "is no scale of keys or values"),
    ],
    ids=["nan", "inf", "zero", "negative", "empty", "matrix", "long"],
)
def test_what_is_no_scale_is_named(tensor: torch.Tensor, message: str, model: Path) -> None:
    name = "model.layers.1.self_attn.v_scale"
    with pytest.raises(ValueError, match=rf"tensor {name} .*{message}"):
        scales(with_tensors(model, {name: tensor}))


@pytest.mark.parametrize("name", ["model.layers.3.self_attn.k_scale", "model.k_scale"])
def test_a_scale_of_no_layer_is_a_tensor_that_has_no_place(name: str, model: Path) -> None:
    with pytest.raises(ValueError, match="holds the tensor"):
        scales(with_tensors(model, {name: torch.tensor(1.0)}))


def test_they_are_what_float8_is_read_by(model: Path) -> None:
    """Scales so small that all is cut off change what is said; in other formats they are unused."""
    plain = {name: said(model, name) for name in ("auto", "fp8_e4m3", "int8")}
    tensors = {
        f"model.layers.{layer}.self_attn.v_scale": torch.tensor(1e-9) for layer in range(LAYERS)
    }
    cut = {name: said(with_tensors(model, tensors), name) for name in plain}
    assert cut["auto"] == plain["auto"] and cut["int8"] == plain["int8"]
    assert cut["fp8_e4m3"] != plain["fp8_e4m3"]
