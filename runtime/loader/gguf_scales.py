"""Scales of GGUF's blocks and of whole tensors. If the scales are finite, so are the numbers.

Sources: the blocks of ggml-org/llama.cpp, ggml/src/ggml-common.h; the names of the tensors,
src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from ..quantization.w8a8 import LARGEST_SCALE

# By format: the bytes of a block at which its float16 scales begin.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q1_0"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
_HALF_INFINITY = 0x7C00  # Larger halves are NaN.
# The largest scale of MXFP4, 2^15 with its bias. Panels have scales in float16, which hold no more.
_LARGEST_POWER = 143
_E4M3_NAN = 0x7F
_ENDINGS = ("scale", "input_scale")
_EMBEDDING = "token_embd"  # Has no scale in llama.cpp.

Factors = npt.NDArray[np.float32]


def are_finite(blocks: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> bool:
    """Return whether the scales of the blocks of a format are numbers that a quantiser writes."""
    rows = blocks.reshape(-1, GGML_QUANT_SIZES[kind][1])
    if kind.name == "MXFP4":
        return not bool((rows[:, 0] > _LARGEST_POWER).any())
    if kind.name == "NVFP4":
        return not bool((rows[:, :4] & 127 == _E4M3_NAN).any())
    if kind.name == "IQ1_M":
        # The last four bytes hold the upper bits of the scale, in their own upper bits.
        ends = rows[:, -4:].copy().view("<u2")
        return not bool((ends & (0xC000, 0x7000) == (0xC000, 0x7000)).all(-1).any())
    halves = (rows.view("<u2")[:, at // 2] for at in _HALVES.get(kind.name, ()))
    return not any(bool((each & _HALF_INFINITY == _HALF_INFINITY).any()) for each in halves)


def take_factors(
    path: Path, tensors: Sequence[ReaderTensor]
) -> tuple[list[ReaderTensor], Mapping[str, Factors]]:
    """Return the tensors that are not scales of others, and the scales by the names of the tensors
    that they multiply: [1], or [E] of the experts of a layer.

    Scales of activations (`.input_scale`) are left out, because activations keep 16 bits. Raises
    `ValueError` for a scale that is not positive, or larger than any valid one.
    """
    owners = {tensor.name: tensor for tensor in tensors}
    others: list[ReaderTensor] = []
    factors: dict[str, Factors] = {}
    for tensor in tensors:
        stem, _, ending = tensor.name.rpartition(".")
        owner = None if stem == _EMBEDDING else owners.get(f"{stem}.weight")
        if owner is None or ending not in _ENDINGS or tensor.shape.tolist() != _shape(owner):
            others.append(tensor)
            continue
        values = dequantize(tensor.data, tensor.tensor_type).reshape(-1).astype(np.float32)
        if not bool(((values > 0) & (values <= LARGEST_SCALE)).all()):
            raise ValueError(
                f"{path}: the tensor {tensor.name} must hold scales above 0 and up to "
                f"{LARGEST_SCALE:g}, got {values[:4].tolist()}; download the model again"
            )
        if ending == "scale":
            factors[owner.name] = values
    return others, factors


def _shape(owner: ReaderTensor) -> list[int]:
    """Return the shape of a tensor's scales."""
    return [int(owner.shape[2]) if len(owner.shape) == 3 else 1]
