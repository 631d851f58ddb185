"""The scales that checkpoints have for keys and values in float8, one of each a layer.

Names: compressed-tensors' `KVCacheScaleType` (`self_attn.k_scale`, `v_scale`), AutoFP8's
`kv_scale`, which serves both, and what vLLM's loaders take beside them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from ..layers.linear import NUMBERS, StoredTensor

KVScales = list[tuple[float, float]]
"""Of keys and of values, a layer."""
_NAME = re.compile(
    r"model\.layers\.(0|[1-9]\d{0,5})\.self_attn\."
    r"(?:(kv)_scale|(?:[kv]_proj\.|attn\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
_LARGEST = 1e4
"""Keys reach four million with it in e4m3: what is beyond is broken."""
_MOST = 1024
"""Heads."""


def split_kv_scales(
    tensors: Sequence[StoredTensor], num_layers: int
) -> tuple[list[StoredTensor], KVScales]:
    """The tensors that are no such scales, and the scales, 1 where the checkpoint has none. Raises
    `ValueError` for a scale that is none.
    """
    others, found = [], {}
    for tensor in tensors:
        name = _NAME.fullmatch(tensor.name)
        if name is None or int(name[1]) >= num_layers:
            others.append(tensor)
            continue
        scale = _read(tensor)
        for part in name[2] or name[3] or name[4]:
            found[int(name[1]), part] = scale
    layers = range(num_layers)
    return others, [(found.get((each, "k"), 1.0), found.get((each, "v"), 1.0)) for each in layers]


def _read(tensor: StoredTensor) -> float:
    """One number, or one a head (compressed-tensors' strategy attn_head), of which the largest
    serves all.
    """
    if prod(tensor.shape[1:]) != 1 or prod(tensor.shape) > _MOST or tensor.dtype not in NUMBERS:
        raise tensor.fault("is no scale of keys or values, which is one number a layer or head")
    scales = tensor.read().double().flatten().tolist()
    if not scales or not all(0.0 < scale <= _LARGEST for scale in scales):
        raise tensor.fault(f"must hold scales above 0 and up to {_LARGEST:g}, got {scales[:4]}")
    return float(max(scales))
