"""Weights of numbers that a device lacks are widened in the host's memory, a layer at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from piecework.kernels.reference import quantize_dynamic
from piecework.kernels.reference import widened as wide_values
from piecework.runtime.config.quantization_registry import PLAIN
from piecework.runtime.layers.linear import Linear, StoredTensor
from piecework.runtime.quantization.methods import make_method

KIND = "widened w8a8 float8_e4m3fn channel token weight_scale"


def stored(name: str, values: torch.Tensor, read: list[str]) -> StoredTensor:
    def copy_to(target: torch.Tensor) -> None:
        read.append(name)
        target.copy_(values)

    return StoredTensor(Path("model"), name, tuple(values.shape), copy_to, values.dtype)


def test_a_weight_is_read_when_its_layer_is_finished() -> None:
    read: list[str] = []
    layers, expected = [Linear(16, 8) for _ in range(2)], []
    for number, layer in enumerate(layers):
        values, scale = quantize_dynamic(torch.randn(8, 16), 16, torch.float8_e4m3fn)
        expected.append(wide_values(values, scale))
        layer.method = make_method(KIND)
        layer.method.create(layer)
        places = layer.method.places(layer, "")
        places["weight"].load(stored(f"weight {number}", values, read))
        places["weight_scale"].load(stored(f"scale {number}", scale, read))
    assert read == ["scale 0", "scale 1"]
    for number, layer in enumerate(layers):
        layer.method.finish(layer, None)
        assert read[2:] == [f"weight {n}" for n in range(number + 1)]
        assert torch.equal(layer.weight, expected[number]) and layer.method.kind == PLAIN
        assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_a_traced_layer_has_no_memory() -> None:
    with torch.device("meta"):
        layer = Linear(16, 8)
        layer.method = make_method(KIND)
        layer.method.create(layer)
        assert layer.weight.is_meta
        layer.method.finish(layer, None)
    assert layer.weight.is_meta and layer.weight.shape == (8, 16)
