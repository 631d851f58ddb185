"""The ways to compile the kernels, one for each kind of CPU."""

from __future__ import annotations

from typing import NamedTuple

from .instruction_sets import instruction_sets


class Variant(NamedTuple):
    """One way to compile the kernels, for CPUs that have all of `needs` (Linux's names)."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_HAS_AVX512_VNNI = _HAS_AVX512 | {"avx512_vnni"}

_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
_HAS_AVX512_BF16 = _HAS_AVX512_VNNI | {"avx512_bf16"}

_NEON = frozenset({"asimd"})
_HAS_DOTPROD = _NEON | {"asimdhp", "asimddp"}

_AVX512_FP16 = (*_AVX512_BF16, "-mavx512fp16")
_HAS_AVX512_FP16 = _HAS_AVX512_BF16 | {"avx512_fp16"}

# Best first for each architecture; the architectures' names differ. The last one runs on every CPU
# that the compiler supports.
VARIANTS = (
    Variant(
        "amx",
        _HAS_AVX512_FP16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_AVX512_FP16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Variant("avx512_fp16", _HAS_AVX512_FP16, _AVX512_FP16),
    Variant("avx512_bf16", _HAS_AVX512_BF16, _AVX512_BF16),
    Variant("avx512_vnni", _HAS_AVX512_VNNI, _AVX512_VNNI),
    Variant("avx512", _HAS_AVX512, _AVX512),
    Variant("avx_vnni", _HAS_AVX2 | {"avx_vnni"}, (*_AVX2, "-mavxvnni")),
    Variant("avx2", _HAS_AVX2, _AVX2),
    Variant(
        "neon_bf16",
        _HAS_DOTPROD | {"bf16", "i8mm"},
        ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",),
    ),
    Variant("neon_dotprod", _HAS_DOTPROD, ("-march=armv8.2-a+fp16+dotprod",)),
    Variant("neon", _NEON, ()),
    Variant("portable", frozenset(), ()),
)


def runnable_variants() -> list[Variant]:
    """Return the variants that this CPU can run, best first."""
    able = instruction_sets()
    return [variant for variant in VARIANTS if variant.needs <= able]
