"""The calls whose kernels are compiled: shapes of published models, through the product's own
wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from piecework.kernels import cache_format
from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.recurrent_steps import DeltaWeights, Mamba2Weights, States
from piecework.kernels.triton import (
    attention,
    linear,
    moe,
    ops,
    packed,
    quantize,
    recurrent,
    sampling,
)
from piecework.kernels.triton.packed_formats import FORMATS

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`--quick` compiles only `quick` cases. The default test compiles one of them."""

    name: str
    call: Callable[[], Any]
    quick: bool = False


def cases() -> Iterator[Case]:
    yield from _attention_cases()
    yield from _weight_cases()
    yield from _expert_cases()
    yield from _packed_cases()
    yield from _small_cases()
    yield from _recurrent_cases()


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def _float32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape)


def _caches(layout: KVLayout, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, heads = layout.cache_dtype or layout.dtype, layout.num_kv_heads
    shape = cache_format.pages_shape(pages, _PAGE, heads, layout.key_size, dtype)
    return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)


def _attend(layout: KVLayout, out_dtype: torch.dtype | None = None) -> None:
    """Run a mixed step, and recorded decodes with and without splits."""
    heads, kv_heads, size = layout.num_heads, layout.num_kv_heads, layout.key_size
    query_lens, seq_lens = [300, 1, 1], [300, 3000, 5]
    tokens = sum(query_lens)
    metadata = AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.zeros(3, 200, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )
    qkv = _numbers(tokens, heads + 2 * kv_heads, size, dtype=layout.dtype)
    q, k, v = qkv.tensor_split([heads, heads + kv_heads], 1)
    out = torch.empty(tokens, heads, size, dtype=out_dtype or layout.dtype)
    scale = None if out_dtype is None else _float32(1)
    backend = attention.TritonAttention()
    plans = [
        (tokens, backend.plan(metadata, _PAGE)),
        (1, backend.capture_plan(256, 256, _PAGE, q.device)),
        (256, backend.capture_plan(256, 4, _PAGE, q.device)),
    ]
    for rows, plan in plans:
        backend.run_quantized(
            q[:rows], k[:rows], v[:rows], out[:rows], scale, *_caches(layout, 8), plan, layout
        )


def _attention_cases() -> Iterator[Case]:
    def case(
        name: str,
        heads: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
        out: torch.dtype | None = None,
        quick: bool = False,
        **others: Any,
    ) -> Case:
        layout = replace(KVLayout.of_heads(*heads, dtype), **others)
        return Case(name, lambda: _attend(layout, out), quick)

    yield case("Llama 3 8B", (32, 8, 128))
    yield case("heads of 64", (9, 3, 64))
    yield case("heads of 80", (32, 32, 80))
    yield case("heads of 96", (32, 32, 96))
    yield case("heads of 192", (8, 8, 192))
    yield case("Gemma 2", (8, 4, 256), softcap=50.0, window=4096, quick=True)
    yield case("Gemma 3", (8, 4, 256), window=1024)
    yield case("Qwen2.5, 7 queries a key", (28, 4, 128))
    yield case("Falcon, 71 queries a key", (71, 1, 64))
    yield case("gpt-oss", (64, 8, 64), sinks=_float32(64), window=128)
    yield case("ALiBi", (32, 32, 128), slopes=_float32(32))
    yield case("float16", (32, 8, 128), torch.float16)
    yield case("float32", (32, 8, 128), torch.float32)
    yield case("float32, heads of 256", (8, 4, 256), torch.float32)
    for cache in (_E4M3, _E5M2, torch.int8):
        name = str(cache).removeprefix("torch.")
        yield case(f"{name} cache", (32, 8, 128), cache_dtype=cache)
        yield case(f"{name} cache, heads of 256", (8, 4, 256), cache_dtype=cache)
    yield case("float8_e4m3fn cache, float16", (32, 8, 128), torch.float16, cache_dtype=_E4M3)
    yield case("FP8 output", (32, 8, 128), out=_E4M3)


def _weight_cases() -> Iterator[Case]:
    columns, size = 6144, 4096  # Llama 3 8B's queries, keys and values.

    def scaled(tokens: int, dtype: torch.dtype, form: str) -> Case:
        def call() -> None:
            x, weight = _numbers(tokens, size, dtype=dtype), _numbers(columns, size, dtype=dtype)
            of_x, of_weight = {
                "rows": (_float32(tokens, 1), _float32(columns, 1)),
                "blocks": (_float32(tokens, size // 128), _float32(columns // 128, size // 128)),
            }[form]
            linear.scaled_linear(x, of_x, weight, of_weight, None, torch.bfloat16)

        name = str(dtype).removeprefix("torch.")
        return Case(f"{name} by {form}, {tokens} tokens", call)

    def weight_only(
        tokens: int, bits: int, group: int = 128, dtype: torch.dtype = torch.bfloat16
    ) -> Case:
        def call() -> None:
            weight = _numbers(columns, size * bits // 8, dtype=torch.uint8)
            scale = _numbers(columns, size // group, dtype=dtype)
            zero = _numbers(columns, size // group, dtype=torch.uint8)
            linear.weight_only_linear(
                _numbers(tokens, size, dtype=dtype), weight, scale, zero, None, bits
            )

        name = str(dtype).removeprefix("torch.")
        quick = (tokens, bits, group, dtype) == (1, 4, 128, torch.bfloat16)
        return Case(f"{bits} bits, groups of {group}, {name}, {tokens} tokens", call, quick)

    for tokens in (1, 64, 4096):
        for dtype in (torch.int8, _E4M3):
            for form in ("rows", "blocks"):
                yield scaled(tokens, dtype, form)
        for bits in (4, 8):
            yield weight_only(tokens, bits)
        yield weight_only(tokens, 4, dtype=torch.float32)
    yield weight_only(1, 4, 32)
    yield weight_only(1, 4, size)
    yield weight_only(1, 4, dtype=torch.float16)


def _expert_cases() -> Iterator[Case]:
    def experts(
        tokens: int, count: int, each: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> Case:
        hidden, inner = sizes

        def call() -> None:
            moe.fused_moe(
                _numbers(tokens, hidden, dtype=dtype),
                torch.zeros(tokens, each, dtype=torch.int64),
                _float32(tokens, each),
                _numbers(count * 2 * inner, hidden, dtype=dtype),
                None,
                _numbers(count * hidden, inner, dtype=dtype),
                None,
                0.0,
                False,
            )

        name = str(dtype).removeprefix("torch.")
        return Case(f"{count} experts, {name}, {tokens} tokens", call)

    for tokens in (1, 2048):
        yield experts(tokens, 128, 8, (2048, 768), torch.bfloat16)
        yield experts(tokens, 8, 2, (1024, 1024), torch.bfloat16)
    yield experts(64, 8, 2, (1024, 1024), torch.float32)

    def choose(count: int, each: int, groups: int) -> Case:
        def call() -> None:
            logits, correction = _numbers(4, count), _float32(count) if groups > 1 else None
            forms = (each, groups > 1, True, groups, max(1, groups // 2), 2, 1.0, 1e-20)
            moe.choose_experts(logits, correction, *forms)

        return Case(f"choice of {each} from {count} experts in {groups} groups", call)

    yield choose(128, 8, 1)
    yield choose(256, 8, 8)


def _packed_cases() -> Iterator[Case]:
    """Weights that stay packed: Llama 3 8B's largest in each format of GGUF, and experts."""
    columns, size = 14336, 4096
    names = list(FORMATS)

    def product(name: str, tokens: int) -> Case:
        def call() -> None:
            weight = _numbers(columns, FORMATS[name].planes(size).row_bytes, dtype=torch.uint8)
            packed.linear(_numbers(tokens, size), weight, None, columns, names.index(name))

        return Case(f"{name}, {tokens} tokens", call)

    def experts(name: str, tokens: int, group: int = 0) -> Case:
        count, each, hidden, inner = 32, 4, 2048, 768
        layout = names.index(name) | group << 7
        form = replace(FORMATS[name], super_size=group) if group else FORMATS[name]

        def weight(rows: int, columns: int) -> torch.Tensor:
            return _numbers(rows, form.planes(columns).row_bytes, dtype=torch.uint8)

        def call() -> None:
            packed.experts(
                _numbers(tokens, hidden),
                torch.zeros(tokens, each, dtype=torch.int64),
                _float32(tokens, each),
                weight(count * 2 * inner, hidden),
                None,
                None,
                weight(count * hidden, inner),
                None,
                None,
                [count, inner, 2 * inner],
                [layout, layout],
                [0, 0],
                0.0,
                False,
            )

        return Case(f"packed experts, {name}, {tokens} tokens", call)

    for tokens in (1, 64, 2048):
        for name, form in FORMATS.items():
            if form.read is not None or name == "nvfp4":
                yield product(name, tokens)
    for tokens in (1, 2048):
        for name in ("MXFP4", "fp8_e4m3", "fp8_e4m3_blocks", "int8", "Q4_K", "Q6_K", "nvfp4"):
            yield experts(name, tokens)
        yield experts("weight_only 4", tokens, 128)
    table = _numbers(1000, FORMATS["Q6_K"].planes(size).row_bytes, dtype=torch.uint8)
    yield Case(
        "Q6_K, rows of an embedding",
        lambda: packed.embedding(
            torch.zeros(4, dtype=torch.int64), table, size, 1000, names.index("Q6_K")
        ),
    )


def _small_cases() -> Iterator[Case]:
    x, weight = _numbers(4, 4096), _numbers(4096)
    qkv, angles = _numbers(4, 48, 128), _numbers(4, 1, 128)
    q, k = qkv[:, :32], qkv[:, 32:40]
    yield Case(
        "norms", lambda: (ops.rms_norm(x, weight, 1e-5), ops.rms_norm(q, weight[:128], 1e-5))
    )
    yield Case("norm of a sum", lambda: ops.add_rms_norm(x, x, weight, 1e-5), quick=True)
    wide = _numbers(4, 16384)
    yield Case("norm of 16384", lambda: ops.add_rms_norm(wide, wide, _numbers(16384), 1e-5))
    yield Case("gated activation", lambda: ops.silu_and_mul(_numbers(4, 2 * 14336)))
    yield Case("rotation", lambda: ops.rotary_embedding(qkv[:, :40], angles, angles))
    head = _numbers(128)
    yield Case(
        "norm and rotation",
        lambda: ops.norm_rotary_embedding(q, k, head, head, 1e-6, angles, angles),
    )
    for rank in (16, 64):
        yield Case(f"adapters of rank {rank}", partial(_adapt, rank), quick=rank == 16)
    for dtype in (torch.int8, _E4M3, _E5M2):
        yield Case(f"quantisation to {dtype}", partial(_quantise, dtype))
    for vocabulary in (32000, 151936):
        yield Case(f"sampling of {vocabulary}", partial(_sample, vocabulary))


def _sample(vocabulary: int) -> None:
    sampling.sample_filtered(
        _float32(8, vocabulary),
        torch.zeros(8, dtype=torch.int64),
        _float32(8),
        _float32(8),
        torch.zeros(8, dtype=torch.float64),
    )


def _adapt(rank: int) -> None:
    """Add updates to the queries, keys and values of Llama 3 8B."""
    rows, slots = [4096, 1024, 1024], 8
    ops.lora(
        _numbers(32, sum(rows)),
        _numbers(32, 4096),
        _numbers(slots, len(rows), 4096, rank),
        _numbers(slots, 1, rank, sum(rows)),
        _float32(slots, len(rows)),
        torch.zeros(slots, len(rows), dtype=torch.int32),
        torch.zeros(32, dtype=torch.int32),
        rows,
    )


def _quantise(dtype: torch.dtype) -> None:
    x, weight, scale = _numbers(4, 4096), _numbers(4096), _float32(1)
    gated = _numbers(4, 2 * 14336)
    quantize.quantize_static(x, scale, dtype)
    quantize.add_rms_norm_quantize_static(x, x, weight, 1e-5, scale, dtype)
    quantize.silu_and_mul_quantize_static(gated, scale, dtype)
    for group in (128, 4096):
        quantize.quantize_dynamic(x, group, dtype)
        quantize.rms_norm_quantize_dynamic(x, weight, 1e-5, group, dtype)
        quantize.add_rms_norm_quantize_dynamic(x, x, weight, 1e-5, group, dtype)
    quantize.silu_and_mul_quantize_dynamic(gated, 128, dtype)
    quantize.silu_and_mul_quantize_dynamic(gated, 14336, dtype)


def _recurrent_cases() -> Iterator[Case]:
    slots = torch.zeros(4, dtype=torch.int64)

    def mamba() -> None:
        heads, size, numbers = 128, 64, 128
        channels = heads * size + 2 * numbers
        conv, each = _float32(channels, 4), _float32(heads)
        weights = Mamba2Weights(conv, _float32(channels), each, each, each, (0.0, 1.0))
        states = States(_numbers(8, 3, channels), _float32(8, heads, size, numbers))
        recurrent.mamba2_step(_numbers(4, channels), _numbers(4, heads), weights, states, slots)

    def delta(decays: int) -> None:
        heads, size, numbers = 32, 128, 128
        channels = heads * size + 2 * 16 * numbers
        weights = DeltaWeights(_float32(channels, 4), _float32(heads), _float32(heads * decays))
        states = States(_numbers(8, 3, channels), _float32(8, heads, numbers, size))
        recurrent.gated_delta_step(
            _numbers(4, channels),
            _numbers(4, heads),
            _numbers(4, heads * decays),
            weights,
            states,
            slots,
        )

    yield Case("Mamba 2", mamba)
    yield Case("gated delta rule", lambda: delta(1))
    yield Case("gated delta rule, a decay per number", lambda: delta(128))
