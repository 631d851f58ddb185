"""The GPU suite's correctness part: compares kernels and graphs with plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import ops, reference
from ..kernels.attention import AttentionBackend, AttentionMetadata, KVLayout
from ..kernels.cache_format import CACHE_DTYPES, pages_shape, store
from ..kernels.paged_attention import TorchAttention
from ..kernels.platform.detect import detect
from ..kernels.platform.platform import Platform
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from .gpu_engines import LLAMA_TINY, QWEN3_TINY, Scale, close, make_engine
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
_MODES: dict[str, dict[str, Any]] = {
    "piecewise": {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "cuda_graph_backend_decode": "disabled",
    },
    "breakable": {
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_backend_decode": "disabled",
    },
    "full decode": {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "full"},
    "steps that do not overlap": {"disable_overlap_schedule": True, "disable_cuda_graph": True},
    "torch's attention": {"attention_backend": "torch", "disable_cuda_graph": True},
}


OFF: dict[str, Any] = {"disable_cuda_graph": True}
# Maximum share of tokens that differ. The logits of a random model are close, so one near tie in
# bfloat16 changes all later tokens.
_OTHER_TOKENS = {"float32": 0.0, "bfloat16": 0.75}


# No check starts with less time than this left, because an unfinished part reports nothing.
_LONGEST_CHECK_SECONDS = 25.0


class Check(NamedTuple):
    """One comparison. `detail` has the difference, or the error."""

    name: str
    ok: bool
    detail: str


def correctness(scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Compare kernels with plain torch, then tokens of small models with and without graphs."""
    platform = detect(device)
    checks: list[Check] = []
    for check in chain(
        _attention_checks(platform),
        _op_checks(platform),
        _quantized_checks(platform),
        _sampling_checks(platform),
        _model_checks(scale, folder, platform),
    ):
        checks.append(check)
        if time.monotonic() > scale.until - _LONGEST_CHECK_SECONDS:
            checks.append(Check("the remaining checks", False, "no time was left"))
            break
    return {
        "ok": all(check.ok for check in checks),
        "checks": [check._asdict() for check in checks],
    }


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
                yield _checked(
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
                        yield _checked(
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
                    yield _checked(
                        f"{what}, {tokens} tokens{name}",
                        lambda v=version, p=product: _op_error(v, p.op, p.arguments),
                    )
        for what, fusion in fusions(tokens, 384, 512, (4, 2, 64), like).items():
            yield _checked(f"{what}, {tokens} tokens", lambda f=fusion: _fusion_error(f))


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
            yield _checked(
                f"{name} of {vocab} tokens",
                lambda p=probs, f=filters, u=uniform: _other_draws(p, *f, u),
                allowed=0.0,
            )


def _other_draws(*arguments: torch.Tensor) -> float:
    return float(
        (ops.sample_filtered(*arguments) != reference.sample_filtered(*arguments)).float().mean()
    )


def _model_checks(scale: Scale, folder: Path, platform: Platform) -> Iterator[Check]:
    """Compare greedy tokens of small models: equal in float32, near ties differ in bfloat16."""
    modes = {
        name: settings
        for name, settings in _MODES.items()
        if platform.graphs_are_real or name != "breakable"
    }
    for model, dtype in (
        (LLAMA_TINY, "float32"),
        (QWEN3_TINY, "float32"),
        (LLAMA_TINY, "bfloat16"),
    ):
        answer = partial(_tokens, scale, folder, platform, model, dtype)
        expected: list[int] = []
        yield _checked(
            f"{model['model_type']} in {dtype}, no graphs",
            lambda e=expected, a=answer: e.extend(a(OFF)) or 0.0,
        )
        for name, settings in modes.items():
            differ = partial(_share_of_other_tokens, answer, settings, expected)
            yield _checked(
                f"{model['model_type']} in {dtype}, {name}", differ, allowed=_OTHER_TOKENS[dtype]
            )


def _share_of_other_tokens(
    answer: Callable[[dict[str, Any]], list[int]], settings: dict[str, Any], expected: list[int]
) -> float:
    actual = answer(settings)
    return sum(one != other for one, other in zip(expected, actual, strict=True)) / len(expected)


def _tokens(
    scale: Scale,
    folder: Path,
    platform: Platform,
    model: dict[str, Any],
    dtype: str,
    settings: dict[str, Any],
) -> list[int]:
    """Return a small model's answers to three prompts, each asked twice for a cached prefix."""
    engine = make_engine(
        scale, folder / model["model_type"], platform.device_type, model=model,
        max_total_tokens=2048, max_running_requests=4,
        **{
            "dtype": dtype, "context_length": 256, "chunked_prefill_size": 64,
            "piecewise_cuda_graph_tokens": "16,32,64",
        } | settings,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for repeat in range(2):
        for number, length in enumerate((3, 100, 41)):
            rid = f"{repeat}-{number}"
            answers[rid] = []
            engine.core.add(
                GenerateRequest(rid=rid, input_ids=list(range(5, 5 + length)), params=params)
            )
        while engine.core.has_work:
            for output in engine.core.step().outputs:
                answers[output.rid] += output.token_ids
    failed, replays = (
        engine.runner.graphs.info().failed_sizes,
        engine.core.stats().graph_replays_total,
    )
    close(engine)
    # An engine without its graphs gives the same answers, so check that the graphs ran.
    if failed:
        raise RuntimeError(f"sizes without a graph: {failed}")
    if platform.graphs_are_real and "disable_cuda_graph" not in settings and not replays:
        raise RuntimeError("no step was replayed")
    return [token for rid in sorted(answers) for token in answers[rid]]


def _within(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> float:
    """Return the distance as a share of `tolerance`, or else of the tolerance of the dtype."""
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(distance) / (tolerance or _TOLERANCE[expected.dtype])


def _checked(name: str, measure: Any, allowed: float = 1.0) -> Check:
    try:
        error = measure()
    except Exception as error_raised:
        return Check(
            name, False, " ".join(f"{type(error_raised).__name__}: {error_raised}".split())[:300]
        )
    return Check(name, bool(error <= allowed), f"{error:.3g} of {allowed:.3g} allowed")
