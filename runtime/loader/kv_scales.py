"""The scales that checkpoints hold for keys and values in float8, one pair for each layer.

Sources of the names: compressed-tensors' `KVCacheScaleType` (`self_attn.k_scale`, `v_scale`),
AutoFP8's `kv_scale`, which is used for both, and other names that vLLM's loaders accept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from ..layers.linear import NUMBERS, StoredTensor

KVScales = list[tuple[float, float]]  # (scale of keys, scale of values) of each layer.
_NAME = re.compile(
    r"model\.layers\.(0|[1-9]\d{0,5})\.self_attn\."
    r"(?:(kv)_scale|(?:[kv]_proj\.|attn\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
_LARGEST = 1e4  # With it, keys reach four million in e4m3. Larger scales are damaged.
_MOST = 1024  # Most heads.


def split_kv_scales(
    tensors: Sequence[StoredTensor], num_layers: int
) -> tuple[list[StoredTensor], KVScales]:
    """Return the tensors that are not such scales, and the scales.

    A layer without scales in the checkpoint gets 1. Raises `ValueError` for an invalid scale.
    """
    others, found = [], {}
    for tensor in tensors:
        name = _NAME.fullmatch(tensor.name)
        if name is None or int(name[1]) >= num_layers:
            others.append(tensor)
            continue
        # If there is a scale for each head (attn_head of compressed-tensors), take the largest.
        if prod(tensor.shape[1:]) != 1 or prod(tensor.shape) > _MOST or tensor.dtype not in NUMBERS:
            raise tensor.fault(
                "is no scale of keys or values: it must hold 1 number, or 1 for each head"
            )
        scales = tensor.read().double().flatten().tolist()
        if not scales or not all(0.0 < scale <= _LARGEST for scale in scales):
            raise tensor.fault(f"must hold scales above 0 and up to {_LARGEST:g}, got {scales[:4]}")
        scale = float(max(scales))
        for part in name[2] or name[3] or name[4]:
            found[int(name[1]), part] = scale
    layers = range(num_layers)
    return others, [(found.get((i, "k"), 1.0), found.get((i, "v"), 1.0)) for i in layers]
