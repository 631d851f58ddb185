"""Layers of experts: the op is the loop over experts that it stands for, in plain torch and on
packed weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples import examples
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from native_variants import built, native_variants

from piecework.kernels import reference
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import NativeLinear
from piecework.kernels.cpu.native.moe import fused_moe

VARIANTS = native_variants()


def looped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layers: list[tuple[torch.Tensor, ...]],
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    """Expert by expert and token by token, in float64: gates, ups, downs, and their biases."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if not 0 <= expert < len(layers):
                continue
            gate, up, down, gate_bias, up_bias, down_bias = (t.double() for t in layers[expert])
            given = row * weight if weighs_input else row
            opened, passed = F.linear(given, gate, gate_bias), F.linear(given, up, up_bias)
            if not len(gate):
                between = F.relu(passed).square()
            elif limit < 0:
                between = F.gelu(opened, approximate="tanh") * passed
            elif limit:
                opened, passed = opened.clamp(max=limit), passed.clamp(-limit, limit)
                between = opened * torch.sigmoid(1.702 * opened) * (passed + 1)
            else:
                between = F.silu(opened) * passed
            result = F.linear(between, down, down_bias)
            out[token] += result if weighs_input else result * weight
    return out


class Layer:
    """`experts` of random numbers, by rows of expert after expert."""

    def __init__(
        self,
        seed: int,
        tokens: int,
        experts: int,
        each: int,
        sizes: tuple[int, int],
        has_gates: bool = True,
    ):
        self.sizes, self.experts = sizes, experts
        self.rows = sizes[1] * (1 + has_gates)
        size, width = sizes
        make = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
            return (torch.randn(shape, generator=make) * scale).bfloat16().float()

        self.gate_up, self.gate_up_bias = (
            normal(experts * self.rows, size),
            normal(experts * self.rows),
        )
        self.down, self.down_bias = normal(experts * size, width), normal(experts * size)
        self.x = normal(tokens, size, scale=1.0)
        # One more than there are: it is another rank's.
        scores = torch.rand(tokens, experts + 1, generator=make)
        self.weights, self.ids = scores.topk(each, dim=-1)

    def looped(self, limit: float, weighs_input: bool) -> torch.Tensor:
        size, width = self.sizes
        gates = self.rows - width
        halves = [each.split([gates, width]) for each in self.gate_up.view(self.experts, -1, size)]
        biases = [each.split([gates, width]) for each in self.gate_up_bias.view(self.experts, -1)]
        layers = [
            (gate, up, down, gate_bias, up_bias, down_bias)
            for (gate, up), down, (gate_bias, up_bias), down_bias in zip(
                halves,
                self.down.view(self.experts, size, width),
                biases,
                self.down_bias.view(self.experts, size),
                strict=True,
            )
        ]
        return looped(self.x, self.ids, self.weights, layers, limit, weighs_input)


FORMS = [(0.0, False), (1.5, False), (0.0, True), (reference.GELU, False)]


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    each=st.integers(1, 4),
    form=st.sampled_from(FORMS),
    has_gates=st.booleans(),
    seed=st.integers(0, 9),
)
def test_plain_torch_is_the_loop(
    tokens: int, experts: int, each: int, form: tuple[float, bool], has_gates: bool, seed: int
) -> None:
    layer = Layer(seed, tokens, experts, min(each, experts), (24, 16), has_gates)
    found = reference.fused_moe(
        layer.x,
        layer.ids,
        layer.weights,
        layer.gate_up,
        layer.gate_up_bias,
        layer.down,
        layer.down_bias,
        *form,
    )
    assert torch.allclose(found.double(), layer.looped(*form), atol=1e-4)


def packed(
    kernels: NativeLinear, kind: str, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as the kernels have it, and its numbers."""
    if kind == "bfloat16":
        return kernels.pack(kind, [weight.bfloat16()]), weight
    if kind == "int8":
        numbers, scale = reference.quantize_dynamic(weight, weight.shape[1], torch.int8)
        return kernels.pack(kind, [numbers], [scale]), numbers.float() * scale
    blocks = quantize(weight.numpy(), GGMLQuantizationType[kind])
    stored = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    return kernels.pack(kind, [torch.from_numpy(np.ascontiguousarray(blocks))]), stored


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@settings(max_examples=examples(6, exploring=20))
@given(
    kind=st.sampled_from(["bfloat16", "Q8_0", "Q4_0", "Q4_1", "int8"]),
    activations=st.sampled_from(["bf16", "int8"]),
    # Of one expert alone more than are multiplied together.
    tokens=st.sampled_from([0, 1, 2, 5, 40, 300]),
    experts=st.integers(1, 7),
    each=st.integers(1, 4),
    form=st.sampled_from(FORMS),
    has_gates=st.booleans(),
    seed=st.integers(0, 9),
)
def test_packed_experts_are_the_loop(
    variant: build.Variant,
    kind: str,
    activations: str,
    tokens: int,
    experts: int,
    each: int,
    form: tuple[float, bool],
    has_gates: bool,
    seed: int,
) -> None:
    library = built(variant)
    kernels = NativeLinear(library, activations=activations)
    layer = Layer(seed, tokens, experts, min(each, experts), (64, 96), has_gates)
    gate_up, layer.gate_up = packed(kernels, kind, layer.gate_up)
    down, layer.down = packed(kernels, kind, layer.down)
    layout = kernels.layout(kind, 64)
    assert layout is not None
    group = (64, 96) if kind == "int8" else (0, 0)
    found = fused_moe(
        library,
        layer.x.bfloat16(),
        layer.ids,
        layer.weights,
        gate_up,
        layer.gate_up_bias.bfloat16(),
        None,
        down,
        layer.down_bias.bfloat16(),
        None,
        (experts, 96, layer.rows),
        (layout, layout),
        group,
        *form,
    )
    exact = layer.looped(*form)
    # bfloat16 between the products, and of int8 what quantising x loses.
    loss = 0.05 if "int8" in (kind, activations) else 0.02
    size = float(exact.abs().max()) if tokens else 0.0
    assert torch.allclose(found.double(), exact, rtol=loss, atol=loss * (1 + size))


def test_only_chosen_experts_are_read() -> None:
    """Memory of the others may be anything: here it is no number."""
    library = built(VARIANTS[0])
    kernels = NativeLinear(library)
    layer = Layer(1, 3, 4, 2, (64, 32))
    layer.ids.fill_(2)
    layer.ids[:, 1] = 0
    expected = layer.looped(0.0, False)
    for weight in (layer.gate_up, layer.down):
        experts = weight.view(4, -1)
        experts[1], experts[3] = float("nan"), float("nan")
    found = fused_moe(
        library,
        layer.x.bfloat16(),
        layer.ids,
        layer.weights,
        kernels.pack("bfloat16", [layer.gate_up.bfloat16()]),
        layer.gate_up_bias.bfloat16(),
        None,
        kernels.pack("bfloat16", [layer.down.bfloat16()]),
        layer.down_bias.bfloat16(),
        None,
        (4, 32, 64),
        (0, 0),
        (0, 0),
        0.0,
        False,
    )
    assert torch.allclose(found.double(), expected, atol=0.1)
