"""Forwards of two-layer models whose linear layers are quantised or split over ranks, traced, and
run as they stand on any number of tokens.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from sparse import sparse
from tiny_models import CONFIGS
from torch import fx, nn

from piecework.compilation.passes.context import PassContext
from piecework.compilation.torch_private import Trace, trace
from piecework.kernels import collectives, fp4, ops, reference
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.layers.linear import Linear
from piecework.runtime.loader.loader import empty_model, finish

LAYERS = 2
ARCHITECTURES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ("mistral", "qwen2") else [])
    for name in sorted(CONFIGS)
]
"""Mistral and Qwen2 run the ops of Llama: they are left to the long runs."""
CONTEXT = PassContext(frozenset())


def models_with(schemes: Sequence[str | None]) -> list[Any]:
    """Return parameters (architecture, scheme). In the default run each scheme has one model."""
    kept = [(("llama", "qwen3")[place % 2], scheme) for place, scheme in enumerate(schemes)]
    return sparse(product(sorted(CONFIGS), schemes), kept=kept)


SCHEMES = ["static int8", "per token int8", "blocks fp8", "static fp8", "fp4"]
_ROW_SIZES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Quantized:
    """A `LinearMethod` of random weights. `group`: columns that share a scale of the activations,
    0 for a static one.
    """

    kind = "random"

    def __init__(self, layer: Linear, dtype: torch.dtype, group: int) -> None:
        numbers = torch.randint(-100, 100, (layer.out_features, layer.in_features))
        self._weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
        self._scale = nn.Parameter(
            torch.rand(layer.out_features, 1) / 1000 / layer.in_features**0.5, requires_grad=False
        )
        self._x_scale = nn.Parameter(torch.tensor([0.03]), requires_grad=False)
        self._dtype, self._group = dtype, group

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if self._group:
            group = min(self._group, x.shape[-1])
            numbers, x_scale = ops.quantize_dynamic(x, group, self._dtype)
        else:
            numbers, x_scale = ops.quantize_static(x, self._x_scale, self._dtype), self._x_scale
        return ops.scaled_linear(numbers, x_scale, self._weight, self._scale, layer.bias, x.dtype)


class Fp4:
    """A `LinearMethod` of random weights and activations of 4 bits."""

    kind = "random"

    def __init__(self, layer: Linear) -> None:
        weight = torch.randn(layer.out_features, layer.in_features) / layer.in_features**0.5
        numbers, scales = ops.quantize_fp4(weight, torch.tensor([1000.0]))
        tensors = numbers, fp4.in_tiles(scales), torch.tensor([1e-6]), torch.tensor([1000.0])
        self._weight, self._scales, self._scale, self._factor = (
            nn.Parameter(tensor, requires_grad=False) for tensor in tensors
        )

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return ops.fp4_linear(
            *ops.quantize_fp4(x, self._factor),
            self._weight,
            self._scales,
            self._scale,
            layer.bias,
            x.dtype,
        )


class Reduced(nn.Module):
    """A layer whose results are summed over ranks, each of which has numbers of its own for it."""

    def __init__(self, layer: nn.Module, ranks: int) -> None:
        super().__init__()
        self.layer = layer
        weight: Any = layer.method._weight if hasattr(layer, "method") else layer.weight
        weight.by_rank = [weight.data.roll(rank, 0) for rank in range(ranks)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(self.layer(x), collectives.TENSOR_PARALLEL)


class Plain:
    """A `LinearMethod` of bfloat16 weights as they are."""

    kind = "plain"

    def __init__(self, layer: Linear) -> None:
        self._weight = layer.weight

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, layer.bias)


def quantiser(scheme: str) -> str:
    """The op that quantises activations of a scheme, without "quantize_"."""
    return "fp4" if scheme == "fp4" else "static" if "static" in scheme else "dynamic"


def traced_model(architecture: str, scheme: str | None, *, ranks: int = 1) -> Trace:
    """`scheme`: one of `SCHEMES`; None: 16-bit weights. Activations are in bfloat16. `ranks`: with
    an all_reduce where a model has one that is split over so many. The graph is the caller's own.
    """
    found = _traced(architecture, scheme, ranks)
    return found._replace(graph=copy.deepcopy(found.graph))


@cache
def _traced(architecture: str, scheme: str | None, ranks: int) -> Trace:
    """Once a process: a second each."""
    config = CONFIGS[architecture](
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        architectures=[f"{architecture.capitalize()}ForCausalLM"],
    )
    register_attention("CPU")
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        config = ModelConfig.from_pretrained(folder)
    model = empty_model(config, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(1)
    for tensor in model.parameters():
        tensor.normal_()
    finish(model, None, progress=False)
    if scheme is not None:
        for layer in (each for each in model.model.modules() if isinstance(each, Linear)):
            if scheme == "fp4":
                layer.method = Fp4(layer)  # type: ignore[assignment]
                continue
            group = 0 if scheme.startswith("static") else 32 if "blocks" in scheme else 1 << 20
            layer.method = Quantized(layer, _ROW_SIZES[scheme.split()[-1]], group)  # type: ignore[assignment]
    if ranks > 1:
        decoder = model.model
        for layer in [each for each in decoder.modules() if isinstance(each, Linear)]:
            if scheme is None:
                layer.method = Plain(layer)  # type: ignore[assignment]
        decoder.embed_tokens = Reduced(decoder.embed_tokens, ranks)
        for block in decoder.layers:
            block.self_attn.o_proj = Reduced(block.self_attn.o_proj, ranks)
            block.mlp.down_proj = Reduced(block.mlp.down_proj, ranks)
    return trace(model.forward, inputs(6 * ranks), 512, ranks)


def inputs(tokens: int) -> list[torch.Tensor]:
    return [torch.arange(tokens) * 7 % 64, torch.arange(tokens) * 3 % 200]


def run(found: Trace, tokens: int, rank: int = 0) -> torch.Tensor:
    """The traced forward on other tokens. Attention only mixes, and knows no cache."""
    input_ids, positions = inputs(tokens)
    values: list[Any] = []
    names = [node.name for node in found.graph.nodes if node.op == "placeholder"]
    for name, value in zip(names, found.values, strict=True):
        if not isinstance(value, torch.Tensor):
            values.append(tokens)
        elif value.dtype is torch.int64:
            values.append(input_ids if "input_ids" in name else positions)
        else:
            values.append(getattr(value, "by_rank", [value] * (rank + 1))[rank])
    (result,) = _Mixing(fx.GraphModule(nn.Module(), found.graph)).run(*values)
    return result


class _Mixing(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        namespace, _, name = str(target).partition(".")
        if namespace != "piecework":
            return super().call_function(target, args, kwargs)
        op = name.removesuffix(".default")
        if hasattr(reference, op):
            return getattr(reference, op)(*args, **kwargs)
        if not op.startswith("attention"):
            return target(*args, **kwargs)
        q, k, v, out, *scale, layer = args
        times = q.shape[1] // k.shape[1]
        mixed = q * k.repeat_interleave(times, 1) + v.repeat_interleave(times, 1)
        mixed = mixed / (1 + layer) / 10
        return out.copy_(ops.quantize_static(mixed, scale[0], out.dtype) if scale else mixed)


def ours(graph: fx.Graph) -> Counter[str]:
    """How often each op of ours is called."""
    found = [str(node.target).split(".") for node in graph.nodes]
    return Counter(parts[1] for parts in found if parts[0] == "piecework")
