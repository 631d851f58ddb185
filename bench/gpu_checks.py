"""The GPU suite's correctness part: compares kernels and graphs with plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels import ops, reference
from ..kernels.attention import AttentionBackend, AttentionMetadata, KVLayout
from ..kernels.cache_format import CACHE_DTYPES, pages_shape, store
from ..kernels.paged_attention import TorchAttention
from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from .gpu_check import Check, checked, run
from .gpu_engines import Scale
from .gpu_quantized import Fusion, fusions, products

# Maximum of |result - plain torch| / |plain torch|.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# (new tokens, cached tokens) of each request.
_STEPS: dict[str, list[tuple[int, int]]] = {
    "prefill": [(300, 0), (17, 0), (64, 0)],
    "prefill over a prefix": [(130, 77), (40, 400)],
    "decode": [(1, past) for past in (0, 15, 16, 200, 999)],
    "mixed": [(1, 700), (90, 30), (1, 0), (5, 5)],
}
_SHAPES = {"8 heads of 4": (32, 8, 128), "7 queries a key": (14, 2, 64), "a head each": (4, 4, 80)}


def correctness(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Compare kernels with plain torch."""
    platform = detect(device)
    return run(
        scale,
        chain(
            _attention_checks(platform),
            _op_checks(platform),
            _quantized_checks(platform),
            _expert_checks(platform),
            _sampling_checks(platform),
        ),
    )


def _attention_checks(platform: Platform) -> Iterator[Check]:
    """Check few combinations of shape, dtype, window and cache: each is a kernel to compile."""
    first = next(iter(_SHAPES))
    combinations: list[tuple[str, torch.dtype, int | None, str]] = [
        (shape, torch.bfloat16, None, "auto") for shape in _SHAPES
    ]
    combinations += [
        (first, torch.bfloat16, 33, "auto"),
        (first, torch.float32, None, "auto"),
        (first, torch.float32, 33, "auto"),
        *((first, torch.bfloat16, None, cache) for cache in CACHE_DTYPES),
    ]
    for shape, dtype, window, cache in combinations:
        for step, lens in _STEPS.items():
            layout = KVLayout.of_heads(*_SHAPES[shape], dtype, window=window)
            layout = replace(layout, cache_dtype=CACHE_DTYPES.get(cache))
            for backend in platform.attention_backends:
                if platform.attention_obstacle(backend, layout) is not None:
                    continue
                name = f"{backend} attention, {step}, {shape}, window {window}, {dtype}, {cache}"
                yield checked(
                    name, lambda b=backend, n=lens, of=layout: _attend(platform, b, n, of)
                )


def _attend(
    platform: Platform,
    name: str,
    lens: list[tuple[int, int]],
    layout: KVLayout,
) -> float:
    """Return the difference from plain torch on a random step, as a share of the tolerance."""
    kv = (layout.num_kv_heads, layout.key_size)
    device, page_size = platform.device(), platform.default_page_size
    draw = np.random.default_rng(1)
    metadata, num_pages = made_up_step(lens, platform, draw)
    total = sum(metadata.query_lens)
    generator = torch.Generator(device).manual_seed(2)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(layout.dtype)

    q = random(total, layout.num_heads, layout.key_size)
    k, v = random(total, *kv), random(total, *kv)
    k_cache, v_cache = (_pages(random(num_pages, page_size, *kv), layout) for _ in range(2))
    results = []
    backends: list[AttentionBackend] = [TorchAttention(), platform.attention_backend(name)]
    for backend in backends:
        caches, out = (k_cache.clone(), v_cache.clone()), torch.full_like(q, float("nan"))
        backend.run(q, k, v, out, *caches, backend.plan(metadata, page_size), layout)
        results.append((out, *caches))
    (expected, *expected_caches), (actual, *actual_caches) = results
    if not all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(expected_caches, actual_caches, strict=True)
    ):
        raise AssertionError("the cache holds other keys and values")
    return _within(actual, expected)


def _pages(numbers: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return numbers [P, S, K, D] in the layer's cache format."""
    if layout.cache_dtype is None:
        return numbers
    pages, page_size, heads, size = numbers.shape
    shape = pages_shape(pages, page_size, heads, size, layout.cache_dtype)
    cache = torch.zeros(shape, dtype=torch.uint8, device=numbers.device).view(layout.cache_dtype)
    slots = torch.arange(pages * page_size, device=numbers.device)
    store(numbers.flatten(0, 1), cache, slots, 1.0)
    return cache


def made_up_step(
    lens: list[tuple[int, int]], platform: Platform, draw: np.random.Generator
) -> tuple[AttentionMetadata, int]:
    """Return a step whose pages have a random order, and the number of pages that it needs."""
    page_size, device = platform.default_page_size, platform.device()
    counts = [-(-sum(pair) // page_size) for pair in lens]
    order, table = (
        (draw.permutation(sum(counts)) + 1).tolist(),
        np.zeros((len(lens), max(counts)), np.int64),
    )
    slots = []
    for row, ((new, past), count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = [order.pop() for _ in range(count)]
        position = np.arange(past, past + new)
        slots.append(table[row, position // page_size] * page_size + position % page_size)
    metadata = AttentionMetadata(
        query_lens=[new for new, _ in lens],
        seq_lens=[sum(pair) for pair in lens],
        block_table=torch.from_numpy(table).to(device, platform.slot_dtype),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device, platform.slot_dtype),
    )
    return metadata, sum(counts) + 1


def _op_checks(platform: Platform) -> Iterator[Check]:
    """Check the version of each op that layers call, and every other version except plain torch."""
    generator = torch.Generator(platform.device()).manual_seed(3)
    versions = {
        "": ops,
        **{
            f", {name}": version
            for name, version in platform.op_versions().items()
            if version is not reference
        },
    }
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 33):

            def random(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(*size, generator=generator, device=platform.device()).to(dtype)

            x, residual, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
            heads, cos, sin = (
                random(tokens, 10, 128)[:, :8],
                random(tokens, 1, 128),
                random(tokens, 1, 128),
            )
            arguments: dict[str, tuple[Any, ...]] = {
                "rms_norm": (x, weight, 1e-5),
                "rms_norm of heads": (heads, random(128), 1e-6),
                "add_rms_norm": (x, residual, weight, 1e-5),
                "silu_and_mul": (random(tokens, 2 * 1000),),
                "rotary_embedding": (heads, cos, sin),
            }
            for what, given in arguments.items():
                op = what.partition(" ")[0]
                for name, version in versions.items():
                    if _takes(version, op, given):
                        yield checked(
                            f"{what}, {tokens} tokens, {dtype}{name}",
                            lambda v=version, o=op, g=given: _op_error(v, o, g),
                        )


def _quantized_checks(platform: Platform) -> Iterator[Check]:
    """Check versions of products against plain torch, and fused ops against separate ones."""
    versions = {"": ops, **{f", {name}": one for name, one in platform.op_versions().items()}}
    like = torch.empty(0, device=platform.device(), dtype=torch.bfloat16)
    for tokens in (1, 33, 200):
        for what, product in products(tokens, 512, 384, like.dtype, like.device).items():
            for name, version in versions.items():
                if version is not reference and _takes(version, product.op, product.arguments):
                    yield checked(
                        f"{what}, {tokens} tokens{name}",
                        lambda v=version, p=product: _op_error(v, p.op, p.arguments),
                    )
        for what, fusion in fusions(tokens, 384, 512, (4, 2, 64), like).items():
            yield checked(f"{what}, {tokens} tokens", lambda f=fusion: _fusion_error(f))


def _expert_checks(platform: Platform) -> Iterator[Check]:
    """Check layers of experts: which are chosen, few and many rows of each, and GPT-OSS's gates."""
    generator = torch.Generator(platform.device()).manual_seed(4)
    experts, each, hidden, inner = 16, 4, 256, 128

    def random(*size: int) -> torch.Tensor:
        numbers = torch.randn(*size, generator=generator, device=platform.device())
        return numbers.to(torch.bfloat16)

    gate_up, down = random(experts * 2 * inner, hidden) / 16, random(experts * hidden, inner) / 12
    for tokens in (1, 33, 500):
        forms = (each, False, True, 4, 2, 2, 1.0, 1e-20)
        routing = (random(tokens, experts).float(), None, *forms)
        yield checked(
            f"choice of experts, {tokens} tokens",
            lambda given=routing: _op_error(ops, "choose_experts", given),
        )
        ids, weights = reference.choose_experts(*routing)
        for limit in (0.0, 7.0):
            given = random(tokens, hidden), ids, weights, gate_up, None, down, None, limit, False
            yield checked(
                f"experts, {tokens} tokens, limit {limit:g}",
                lambda given=given: _op_error(ops, "fused_moe", given),
            )


def _fusion_error(fusion: Fusion) -> float:
    """Return the difference of a fused op, as a share of bfloat16's tolerance."""
    fused, apart = fusion.fused(), fusion.apart()
    pairs = zip(fused, apart, strict=True) if isinstance(fused, tuple | list) else [(fused, apart)]
    return max(_within(one, other, _TOLERANCE[torch.bfloat16]) for one, other in pairs)


def _takes(version: Any, op: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a version computes this call. A version that raises also counts."""
    try:
        return getattr(version, op, lambda *given: None)(*arguments) is not None
    except Exception:
        return True


def _op_error(version: Any, op: str, arguments: tuple[Any, ...]) -> float:
    actual, expected = getattr(version, op)(*arguments), getattr(reference, op)(*arguments)
    pairs = (
        zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    )
    return max(_within(one, other) for one, other in pairs)


def _sampling_checks(platform: Platform) -> Iterator[Check]:
    """Compare the tokens of every filter, on a peaked row and a flat row of each vocabulary."""
    generator = torch.Generator(platform.device()).manual_seed(4)
    for vocab in (49152, 151936):
        for name, (top_k, top_p, min_p) in {
            "top-k": (50, 1.0, 0.0),
            "top-p": (vocab, 0.95, 0.0),
            "all": (40, 0.9, 0.02),
        }.items():
            scales = torch.tensor([[4.0], [0.1]], device=platform.device())
            probs = (
                torch.randn(2, vocab, generator=generator, device=platform.device()) * scales
            ).softmax(-1)
            filters = [
                torch.full((2,), value, device=platform.device()) for value in (top_k, top_p, min_p)
            ]
            uniform = torch.rand(
                2, generator=generator, device=platform.device(), dtype=torch.float64
            )
            yield checked(
                f"{name} of {vocab} tokens",
                lambda p=probs, f=filters, u=uniform: _other_draws(p, *f, u),
                allowed=0.0,
            )


def _other_draws(*arguments: torch.Tensor) -> float:
    return float(
        (ops.sample_filtered(*arguments) != reference.sample_filtered(*arguments)).float().mean()
    )


def _within(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> float:
    """Return the distance as a share of `tolerance`, or else of the tolerance of the dtype."""
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(distance) / (tolerance or _TOLERANCE[expected.dtype])
