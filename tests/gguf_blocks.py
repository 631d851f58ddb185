"""Rows of blocks as GGUF's formats have them, of random bits: the gguf library reads formats that
it cannot write.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from piecework.kernels.cpu.native import build

FORMATS = sorted(
    path.stem.upper()
    for path in (Path(build.__file__).parent / "gguf").glob("*.h")
    if path.stem not in ("block", "formats")
)
"""The formats that the CPU's kernels have a file for."""
_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
}
"""Where a block has its float16 numbers."""


def random_blocks(
    kind: str, rows: int, columns: int, seed: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """[rows, bytes], and the numbers that the gguf library makes of them, [rows, columns]."""
    generator = np.random.default_rng(seed)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    for place in _HALVES[kind]:
        halves = generator.normal(0, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(115, 125, blocks.shape[:2])  # powers of two
    if kind == "NVFP4":
        blocks[..., :4] = generator.integers(1, 60, (*blocks.shape[:2], 4))  # e4m3, up to 0.625
    stored = blocks.reshape(rows, -1)
    return stored, dequantize(stored, GGMLQuantizationType[kind])
