"""Compiles Triton's kernels for GPUs that need not be there: `compile_kernels.py all CAPABILITY`
(80, 90, 100), or `some` for one of each kind; prints what each takes.

Runs as a process of its own, because Triton decides once whether its kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piecework.kernels.triton import attention_kernels as attention
from piecework.kernels.triton import cache_kernels as cache
from piecework.kernels.triton import linear, moe, moe_kernels
from piecework.kernels.triton import linear_kernels as products
from piecework.kernels.triton import op_kernels as ops
from piecework.kernels.triton import quantize_kernels as quantize
from piecework.kernels.triton import recurrent_kernels as recurrent
from piecework.kernels.triton import sampling_kernel as sampling

_POINTERS = {
    **dict.fromkeys(
        (
            "q",
            "k",
            "v",
            "out",
            "k_cache",
            "v_cache",
            "x",
            "weight",
            "residual",
            "total",
            "cos",
            "signed_sin",
            "k_weight",
            "q_weight",
            "bias",
        ),
        "*bf16",
    ),
    **dict.fromkeys(("slots", "block_table"), "*i64"),
    **dict.fromkeys(("tiles", "query_starts", "seq_lens", "rows", "requests"), "*i32"),
    **dict.fromkeys(("partial", "partial_lse", "probs", "candidates", "top_ps", "min_ps"), "*fp32"),
    **dict.fromkeys(("top_ks", "drawn"), "*i64"),
    **dict.fromkeys(("scale", "x_scale", "weight_scale", "out_scale"), "*fp32"),
    **dict.fromkeys(("sinks", "slopes"), "*fp32"),
    **{"ids": "*i32", "uniforms": "*fp64"},
    **dict.fromkeys(("k_scales", "v_scales"), "*bf16"),
}
_KINDS = ("KIND", "QUANTIZED", "BITS", "DIRECT")
_FLOATS = ("scale_log2", "value_scale", "k_scale", "v_scale", "eps", "cap_log2")
_FLOATS += ("least_dt", "most_dt", "most_written")
_HEADS = {"GROUP": 4, "HEAD": 128, "BLOCK_D": 128, "PAGE": 16, "PRECISION": "ieee"}
_HEADS |= {"KIND": 0, "QUANTIZED": 0, "CAPPED": False, "SINKS": False, "SLOPES": False}
_WEIGHED = _HEADS | {"CAPPED": True, "SINKS": True, "SLOPES": True, "BLOCK_N": 64}
_BYTES = {"k_cache": "*u8", "v_cache": "*u8"}
_FP8_OUTPUT = {"QUANTIZED": 3, "out": "*u8"}
_E4M3 = {"SIZE": 4096, "DYNAMIC": True, "LARGEST": 448.0, "MANTISSA": 3, "BIAS": 7, "out": "*u8"}
_FP8 = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "X_MANTISSA": 0, "WEIGHT_MANTISSA": 0}
_FLOAT32 = dict.fromkeys(("weight", "bias", "out", "conv", "a", "d", "dt_bias"), "*fp32")
_FLOAT32 |= dict.fromkeys(("dt", "b", "gate"), "*bf16")
_NUMBERS = {
    "int8": _FP8 | {"x": "*i8", "weight": "*i8"},
    "fp8": _FP8,
    "fp8 widened": {"x": "*u8", "weight": "*u8", "X_MANTISSA": 3, "WEIGHT_MANTISSA": 3},
}


def _product(tokens: int, kind: str, per_block: bool) -> tuple[Any, dict[str, Any], dict[str, int]]:
    tiles = linear._scaled_tiles(tokens, kind == "fp8 widened")
    constants = _NUMBERS[kind] | {"PER_BLOCK": per_block, "HAS_BIAS": True, "WHOLE": True}
    return products.scaled_linear_kernel, constants | _blocks(tiles), _options(tiles)


def _weight_only(tokens: int, bits: int) -> tuple[Any, dict[str, Any], dict[str, int]]:
    tiles = linear._weight_only_tiles(tokens)
    constants = {"weight": "*u8", "zero": "*u8", "scale": "*bf16", "BITS": bits}
    constants |= {"HAS_BIAS": False, "WHOLE": True}
    return products.weight_only_linear_kernel, constants | _blocks(tiles), _options(tiles)


def _experts(pairs: int) -> tuple[Any, dict[str, Any], dict[str, int]]:
    tiles = moe._tiles(pairs, 1, torch.bfloat16)
    constants = {"sources": "*i64", "experts": "*i32", "firsts": "*i32", "ends": "*i32"}
    constants |= {"HAS_BIAS": True, "WHOLE": True, "BLOCK_M": tiles.rows}
    constants |= {"BLOCK_N": tiles.columns, "BLOCK_K": tiles.deep}
    return moe_kernels.expert_linear_kernel, constants, _options(tiles)


def _blocks(tiles: Any) -> dict[str, int]:
    return {"BLOCK_M": tiles.tokens, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.deep}


def _options(tiles: Any) -> dict[str, int]:
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


KERNELS: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
    (
        attention.store_kernel,
        {"KV_HEADS": 8, "HEAD": 128, "BLOCK": 1024, "PAGE": 16},
        {"num_warps": 4},
    ),
    (
        attention.prefill_kernel,
        _WEIGHED | {"GROUP_PAD": 4, "BLOCK_M": 128, "WINDOW": 1000},
        {"num_warps": 8, "num_stages": 2},
    ),
    (
        attention.decode_kernel,
        _WEIGHED | {"BLOCK_M": 16, "WINDOW": 0, "DIRECT": False},
        {"num_warps": 4, "num_stages": 2},
    ),
    *(
        (
            attention.prefill_kernel,
            _HEADS | {"GROUP_PAD": 4, "BLOCK_M": rows, "BLOCK_N": 64, "WINDOW": window},
            {"num_warps": rows // 16, "num_stages": 2},
        )
        for rows, window in ((128, 0), (64, 4096))
    ),
    *(
        (
            attention.decode_kernel,
            _HEADS | {"BLOCK_M": 16, "BLOCK_N": 64, "WINDOW": 0, "DIRECT": direct},
            {"num_warps": 4, "num_stages": 2},
        )
        for direct in (False, True)
    ),
    *(
        kernel
        for kind in (1, 2, 3)
        for kernel in (
            (
                cache.store_bytes_kernel,
                _BYTES
                | {"KV_HEADS": 8, "HEAD": 128, "HEADS_BLOCK": 8, "BLOCK": 128}
                | {"PAGE": 16, "KIND": kind},
                {"num_warps": 4},
            ),
            (
                attention.prefill_kernel,
                _HEADS
                | _BYTES
                | {"GROUP_PAD": 4, "BLOCK_M": 128, "BLOCK_N": 64, "WINDOW": 0, "KIND": kind},
                {"num_warps": 8, "num_stages": 2},
            ),
            (
                attention.decode_kernel,
                _HEADS
                | _BYTES
                | {"BLOCK_M": 16, "BLOCK_N": 64, "WINDOW": 0, "DIRECT": False, "KIND": kind},
                {"num_warps": 4, "num_stages": 2},
            ),
        )
    ),
    # A head size that is no power of two, seven queries a key; a large head; float32: each with the
    # blocks that it gets.
    (
        attention.prefill_kernel,
        _HEADS
        | {"GROUP": 7, "GROUP_PAD": 8, "HEAD": 80, "BLOCK_M": 128, "BLOCK_N": 64, "WINDOW": 0},
        {"num_warps": 8, "num_stages": 2},
    ),
    (
        attention.prefill_kernel,
        _HEADS
        | {"HEAD": 256, "BLOCK_D": 256, "GROUP_PAD": 4, "BLOCK_M": 128, "BLOCK_N": 32, "WINDOW": 0},
        {"num_warps": 8, "num_stages": 2},
    ),
    *(
        (
            attention.combine_kernel,
            {"HEAD": 128, "BLOCK_D": 128, "MAX_SPLITS": 32} | output,
            {"num_warps": 4},
        )
        for output in ({"QUANTIZED": 0}, _FP8_OUTPUT)
    ),
    (
        attention.prefill_kernel,
        _HEADS | {"GROUP_PAD": 4, "BLOCK_M": 128, "BLOCK_N": 64, "WINDOW": 0} | _FP8_OUTPUT,
        {"num_warps": 8, "num_stages": 2},
    ),
    (
        attention.decode_kernel,
        _HEADS | {"BLOCK_M": 16, "BLOCK_N": 64, "WINDOW": 0, "DIRECT": True} | _FP8_OUTPUT,
        {"num_warps": 4, "num_stages": 2},
    ),
    (ops.rms_norm_kernel, {"SIZE": 128, "BLOCK": 128}, {"num_warps": 1}),
    (ops.add_rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096}, {"num_warps": 16}),
    (ops.silu_and_mul_kernel, {"SIZE": 14336, "BLOCK": 1024}, {"num_warps": 4}),
    (ops.rotary_kernel, {"HEADS": 40, "HALF": 64, "BLOCK": 1024}, {"num_warps": 4}),
    (
        ops.norm_rotary_kernel,
        {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "ROWS": 8, "BLOCK": 64},
        {"num_warps": 4},
    ),
    (quantize.quantize_kernel, _E4M3 | {"BLOCK": 1024, "GROUP": 128}, {"num_warps": 4}),
    (
        quantize.rms_norm_quantize_kernel,
        _E4M3 | {"ADD": True, "BLOCK": 4096, "GROUP": 4096},
        {"num_warps": 16},
    ),
    (
        quantize.silu_and_mul_quantize_kernel,
        _E4M3 | {"SIZE": 14336, "BLOCK": 16384, "GROUP": 16384},
        {"num_warps": 16},
    ),
    (
        quantize.silu_and_mul_quantize_kernel,
        _E4M3
        | {"SIZE": 14336, "BLOCK": 1024, "DYNAMIC": False, "MANTISSA": 0, "GROUP": 0, "out": "*i8"},
        {"num_warps": 4},
    ),
    *(
        _product(tokens, kind, per_block)
        for tokens in (1, 64, 4096)
        for kind in _NUMBERS
        for per_block in (False, True)
    ),
    *(_weight_only(tokens, bits) for tokens in (1, 64, 4096) for bits in (4, 8)),
    *(_experts(pairs) for pairs in (8, 64, 4096)),
    (
        recurrent.conv_step_kernel,
        {"COLUMNS": 4, "HAS_BIAS": True, "SILU": True, "BLOCK": 256, "states": "*bf16"} | _FLOAT32,
        {"num_warps": 4},
    ),
    (
        recurrent.ssd_step_kernel,
        {"BLOCK_P": 32, "BLOCK_N": 128, "states": "*fp32"} | _FLOAT32,
        {"num_warps": 4},
    ),
    *(
        (
            recurrent.delta_step_kernel,
            {"DECAYS": decays, "BLOCK_P": 32, "BLOCK_N": 128, "states": "*fp32"} | _FLOAT32,
            {"num_warps": 4},
        )
        for decays in (1, 128)
    ),
    (sampling.sample_filtered_kernel, {"BLOCK": 4096}, {"num_warps": 16}),
]
"""With the constants and options of an 8B model in bfloat16; a pointer that is of another type than
`_POINTERS` says stands among the constants.
"""


def compile_for(
    kernel: Any, constants: dict[str, Any], options: dict[str, int], capability: int
) -> dict[str, Any]:
    """Shared memory in bytes, and which matrix instructions there are."""
    pointers = _POINTERS | {
        name: value for name, value in constants.items() if str(value).startswith("*")
    }
    constants = {name: value for name, value in constants.items() if name not in pointers}
    types = {
        name: "constexpr" if name in constants else pointers.get(name, _type(name))
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in pointers or "stride" in name
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, types, places, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "shared": compiled.metadata.shared,
        "constants": {name: str(value) for name, value in constants.items()},
        "matrix": [
            name
            for name in ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
            if name in compiled.asm["ptx"]
        ],
        "copies_ahead": "cp.async" in compiled.asm["ptx"],
    }


def _type(name: str) -> str:
    return "fp32" if name in _FLOATS else "i32"


def _one_of_each() -> list[Any]:
    """One of each kernel and its types of numbers, and of one format of caches of bytes."""
    found = {}
    for kernel in KERNELS:
        if kernel[1].get("KIND", 0) > 1:
            continue
        kinds = [(n, v) for n, v in kernel[1].items() if n in _KINDS or str(v).startswith("*")]
        found.setdefault((kernel[0].__name__, *sorted(kinds)), kernel)
    return list(found.values())


if __name__ == "__main__":
    which, capability = _one_of_each() if sys.argv[1] == "some" else KERNELS, int(sys.argv[2])
    print(
        json.dumps(
            [
                compile_for(*kernel, capability)
                for kernel in which
                if capability >= 89 or "*fp8e4nv" not in kernel[1].values()
            ]
        )
    )
