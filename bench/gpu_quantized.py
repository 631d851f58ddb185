"""The GPU suite's quantised layers: products with every kernel, compared with 16 bits, and fused
ops compared with separate ops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..kernels import reference
from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_engines import Scale, no_grad
from .gpu_ops import microseconds

_TOKENS = (1, 16, 256, 4096)
_GROUP = 128
# This version of `Platform.op_versions` is not timed, because it widens the whole weight.
_PLAIN = "torch"
_FP8 = torch.float8_e4m3fn


class Product(NamedTuple):
    """A call of `op`, and the bytes that it reads of the weight."""

    op: str
    arguments: tuple[Any, ...]
    weight_bytes: int


def products(
    tokens: int, columns: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Product]:
    """Return x [tokens, size] times a weight [columns, size] for each kind of numbers and
    scales.
    """
    generator = torch.Generator(device).manual_seed(5)
    group = min(_GROUP, size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, found = random(tokens, size).to(dtype), {}
    for what, numbers, columns_each, shape in (
        ("FP8, scales of rows", _FP8, size, (columns, 1)),
        ("FP8, scales of blocks", _FP8, group, (-(-columns // group), -(-size // group))),
        ("INT8, scales of rows", torch.int8, size, (columns, 1)),
    ):
        quantized, x_scale = reference.quantize_dynamic(x, columns_each, numbers)
        weight = (random(columns, size) * 30).to(numbers)
        scale = random(*shape).abs() / 1000
        arguments = (quantized, x_scale, weight, scale, None, dtype)
        found[what] = Product("scaled_linear", arguments, weight.numel())
    for bits in (8, 4):
        length = size * bits // 8
        packed = torch.randint(
            0, 256, (columns, length), generator=generator, device=device, dtype=torch.uint8
        )
        scale = (random(columns, size // group).abs() / 100).to(dtype)
        zero = torch.full(scale.shape, 1 << (bits - 1), device=device, dtype=torch.uint8)
        few = (x, packed, scale, zero, None, bits)
        found[f"{bits}-bit weights"] = Product("weight_only_linear", few, packed.numel())
    return found


class Fusion(NamedTuple):
    """A fused op and the ops that it replaces. Both return the same tensors in the same order."""

    fused: Callable[[], Any]
    apart: Callable[[], Any]


def fusions(
    tokens: int, hidden: int, inner: int, heads: tuple[int, int, int], like: torch.Tensor
) -> dict[str, Fusion]:
    """Return the fusions by name.

    `heads` are (query heads, key heads, size). `like` has the dtype and the device.
    """
    ops = torch.ops.piecework

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=like.device).to(like.dtype)

    x, residual, weight, gates = (
        random(*shape)
        for shape in ((tokens, hidden), (tokens, hidden), (hidden,), (tokens, 2 * inner))
    )
    scale = torch.full((1,), 0.05, device=like.device)

    def add_norm(group: int) -> Any:
        normalised, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        return *ops.quantize_dynamic(normalised, group, _FP8), total

    def add_norm_static() -> Any:
        normalised, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        return ops.quantize_static(normalised, scale, _FP8), total

    group = min(_GROUP, hidden, inner)
    q_heads, kv_heads, size = heads
    beside, angles = random(tokens, q_heads + kv_heads, size), random(2, tokens, 1, size)
    q, k, of_q, of_k = beside[:, :q_heads], beside[:, q_heads:], random(size), random(size)

    def norm_rotary() -> Any:
        normalised = (ops.rms_norm(q, of_q, 1e-6), ops.rms_norm(k, of_k, 1e-6))
        return ops.rotary_embedding(torch.cat(normalised, 1), angles[0], angles[1])

    added = (x, residual, weight, 1e-5)
    dynamic = ops.add_rms_norm_quantize_dynamic
    return {
        "add, norm, quantise rows": Fusion(
            partial(dynamic, *added, hidden, _FP8), partial(add_norm, hidden)
        ),
        "add, norm, quantise groups": Fusion(
            partial(dynamic, *added, group, _FP8), partial(add_norm, group)
        ),
        "add, norm, quantise by one scale": Fusion(
            partial(ops.add_rms_norm_quantize_static, *added, scale, _FP8), add_norm_static
        ),
        "gate, quantise rows": Fusion(
            partial(ops.silu_and_mul_quantize_dynamic, gates, inner, _FP8),
            lambda: ops.quantize_dynamic(ops.silu_and_mul(gates), inner, _FP8),
        ),
        "gate, quantise groups": Fusion(
            partial(ops.silu_and_mul_quantize_dynamic, gates, group, _FP8),
            lambda: ops.quantize_dynamic(ops.silu_and_mul(gates), group, _FP8),
        ),
        "gate, quantise by one scale": Fusion(
            partial(ops.silu_and_mul_quantize_static, gates, scale, _FP8),
            lambda: ops.quantize_static(ops.silu_and_mul(gates), scale, _FP8),
        ),
        "norm and rotation of heads": Fusion(
            partial(ops.norm_rotary_embedding, q, k, of_q, of_k, 1e-6, angles[0], angles[1]),
            norm_rotary,
        ),
    }


@no_grad
def quantized_times(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Measure products and fused ops, in microseconds per call.

    Return `products` by layer, tokens, kind and version, 16 bits included, with the bytes of the
    weight; `fusions`, fused and separate; and `errors` of those that did not run.
    """
    platform, dtype = detect(device), getattr(torch, scale.dtype)
    model = scale.model
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    heads = (model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"])
    found: dict[str, Any] = {"products": [], "fusions": [], "errors": {}}
    for tokens in (number for number in _TOKENS if number <= max(scale.prefill_sizes)):
        for layer, columns, size in (("gate and up", 2 * inner, hidden), ("down", hidden, inner)):
            found["products"] += _product_rows(layer, tokens, columns, size, platform, scale, found)
        like = torch.empty(0, device=platform.device(), dtype=dtype)
        for what, fusion in fusions(tokens, hidden, inner, heads, like).items():
            found["fusions"].append(
                {
                    "what": what,
                    "tokens": tokens,
                    "fused": microseconds(fusion.fused, platform, scale),
                    "apart": microseconds(fusion.apart, platform, scale),
                }
            )
    return found


def _product_rows(
    layer: str,
    tokens: int,
    columns: int,
    size: int,
    platform: Platform,
    scale: Scale,
    found: dict[str, Any],
) -> list[dict[str, Any]]:
    dtype = getattr(torch, scale.dtype)
    x, weight = (
        torch.randn(rows, size, device=platform.device()).to(dtype) for rows in (tokens, columns)
    )
    plain = microseconds(partial(F.linear, x, weight), platform, scale)
    about = {"layer": layer, "tokens": tokens}
    rows = [
        about
        | {"kind": scale.dtype, "bytes": weight.nbytes, "plain": plain, "times": {_PLAIN: plain}}
    ]
    for kind, product in products(tokens, columns, size, dtype, platform.device()).items():
        times: dict[str, float] = {}
        for name, version in platform.op_versions().items():
            call = getattr(version, product.op, None)
            if name == _PLAIN or call is None:
                continue
            try:
                if call(*product.arguments) is not None:
                    times[name] = microseconds(partial(call, *product.arguments), platform, scale)
            except Exception as error:
                what = f"{layer}, {tokens} tokens, {kind}, {name}"
                found["errors"][what] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        row = about | {"kind": kind, "bytes": product.weight_bytes, "plain": plain, "times": times}
        rows += [row] if times else []
    return rows
