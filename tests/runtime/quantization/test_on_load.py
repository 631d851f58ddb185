"""`--quantization` of 16-bit weights: what comes of them, and what memory it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import SIZES, differences, make_fp8, reference, said
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.layers.linear import Linear
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.loader import load_model, random_model
from piecework.runtime.quantization.grouped_weight import GroupedWeight, widened
from piecework.runtime.quantization.methods import describe, linear_kinds
from piecework.runtime.quantization.on_load import quantise_q4_0, quantise_q8_0

CPU = torch.device("cpu")
LARGEST = {"int8": 127, "fp8": 448}
BLOCKS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
ALL = [*LARGEST, *BLOCKS]


def rounded(x: torch.Tensor, quantization: str) -> torch.Tensor:
    """Each row to 8 bits by its largest number, and back."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST[quantization]
    numbers = x / scale
    if quantization == "int8":
        return numbers.round() * scale
    return numbers.to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("quantization", LARGEST)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_rounded_by_row_and_activations_by_token(
    quantization: str, tied: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied, **SIZES)
    expected = reference(
        folder,
        lambda tensors: rounded(tensors["weight"], quantization),
        lambda name, x: rounded(x, quantization),
        quantised=lambda name: "proj" in name or name == "lm_head",
    )
    found = differences(expected, said(folder, quantization=quantization))
    # A sum in another order may round one activation to its neighbour: that token is off by more.
    assert found[int(0.9 * len(found))] < 1e-4 and found[-1] < 0.3


def in_blocks(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    kind = BLOCKS[quantization]
    return torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))


@pytest.mark.parametrize("quantization", BLOCKS)
def test_blocks_are_those_of_the_gguf_library(quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", **SIZES)
    expected = reference(
        folder,
        lambda tensors: in_blocks(tensors["weight"], quantization),
        quantised=lambda name: "proj" in name or name == "lm_head",
    )
    assert differences(expected, said(folder, quantization=quantization))[-1] < 1e-3


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_blocks_of_any_numbers(seed: int, rows: int, blocks: int) -> None:
    """Rows of zeros, of one number and of ties among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 32 * blocks, generator=generator)
    values = values.round() if seed % 3 == 0 else values
    values[0] = float(seed % 2)
    for quantise, bits, name in ((quantise_q8_0, 8, "q8_0"), (quantise_q4_0, 4, "q4_0")):
        weight = GroupedWeight(*quantise(values))
        found = widened(weight, bits, torch.float32)
        assert torch.equal(found, in_blocks(values, name))


def test_layers_whose_width_does_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=72)
    model = load_model(str(folder), torch.float32, CPU, False, None, quantization="q8_0")
    assert describe(model) == [
        "10 layers in 8 bits in groups of 32: 0.1 MiB",
        "3 layers in float32: 0.1 MiB",
    ]


def layers_of(model: torch.nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def shapes_of(model: torch.nn.Module) -> dict[str, Any]:
    return {
        name: (tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("quantization", ALL)
def test_a_hollow_model_has_the_shapes_of_the_loaded_one(
    quantization: str, packed: bool, tmp_path: Path
) -> None:
    kernels, dtype = (native_linear(), torch.bfloat16) if packed else (None, torch.float32)
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True, **SIZES)
    loaded = load_model(str(folder), dtype, CPU, False, kernels, quantization=quantization)
    kinds = linear_kinds(loaded)
    hollow = hollow_model(loaded.config, dtype, CPU, kernels, kinds)
    assert shapes_of(hollow) == shapes_of(loaded) and linear_kinds(hollow) == kinds
    assert all(kind.endswith("packed") == packed for kind in kinds.values())


@pytest.mark.parametrize("quantization", ALL)
def test_packed_layers_compute_what_plain_ones_do(quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", **SIZES)
    packed, plain = (
        layers_of(load_model(str(folder), dtype, CPU, False, each, quantization=quantization))
        for dtype, each in ((torch.bfloat16, native_linear()), (torch.float32, None))
    )
    for name, layer in packed.items():
        x = torch.randn(5, layer.in_features).bfloat16()
        assert layer.layout is not None and plain[name].layout is None
        assert torch.allclose(layer(x).float(), plain[name](x.float()), rtol=0.02, atol=0.05), name


@pytest.mark.parametrize("quantization", ALL)
def test_random_weights_are_quantised_alike_each_time(quantization: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True, **SIZES)
    first, second = (
        random_model(str(folder), torch.float32, CPU, quantization=quantization).state_dict()
        for _ in range(2)
    )
    assert first["lm_head.weight"].dtype != torch.float32
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, block=False)
    with pytest.raises(ValueError, match=r"--quantization int8 needs weights of 16 bits.* auto"):
        load_model(str(folder), torch.float32, CPU, False, quantization="int8")
    with pytest.raises(ValueError, match=r"dummy makes weights of 16 bits.*--quantization none"):
        random_model(str(folder), torch.float32, CPU, quantization="auto")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight holds numbers that"):
        load_model(str(folder), torch.float32, CPU, False, quantization="int8")


MEASURE = """
import sys, threading, time
import torch
from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.loader.loader import load_model
from piecework.runtime.config.model import ModelConfig

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

native_linear()
ModelConfig.from_pretrained(sys.argv[1])    # imports transformers
torch.ones(256, 256) @ torch.ones(256, 256)
before = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
model = load_model(sys.argv[1], torch.bfloat16, torch.device("cpu"), False, native_linear(),
                   quantization=sys.argv[2])
kept = sum(tensor.nbytes for tensor in model.state_dict().values())
print((peak - before) / kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_that_of_the_result(tmp_path: Path) -> None:
    """A layer's 16-bit numbers are there while that layer is quantised, and no longer."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10}
    folder = make_tiny_model(tmp_path / "model", dtype="bfloat16", **sizes)
    arguments = [sys.executable, "-c", MEASURE, str(folder), "int8"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    # All in 16 bits beside the result would be 3.
    assert float(done.stdout) < 2
