"""Tensors of tiny models as llama.cpp's converter leaves them."""

from __future__ import annotations

from typing import Any

import torch

GROUPS = 2
"""Of Mamba 2's mixers, in all tiny models that become GGUF files."""


def by_kind_of_head(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """All queries before all keys and all values, and the norms of all heads as one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        norms, _, head = name.partition(".norms.")
        if head:
            same = [each for each in tensors if each.startswith(f"{norms}.norms.")]
            numbered = (f"{norms}.norms.{head}.weight" for head in range(len(same)))
            found[f"{norms}.weight"] = torch.stack([tensors[each] for each in numbered])
        elif ".query_key_value." in name:
            size = config.hidden_size // config.num_attention_heads
            kv_heads = (len(tensor) // size - config.num_attention_heads) // 2
            groups = tensor.unflatten(0, (kv_heads, -1, size))
            parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
            found[name] = torch.cat([part.flatten(0, 2) for part in parts])
        else:
            found[name] = tensor
    return found


def value_heads_apart(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As llama.cpp's `_LinearAttentionVReorderBase`: [key heads, each] become [each, key heads]."""
    dim, skipped, unit = 0, 0, 1
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        skipped, unit = 2 * 2 * 24, 16
    elif name.endswith("in_proj_z.weight"):
        unit = 16
    elif name.endswith("out_proj.weight"):
        dim, unit = 1, 16
    elif "norm" in name:
        return tensor
    first, rest = tensor.tensor_split([skipped], dim=dim)
    apart = rest.unflatten(dim, (2, 2, unit)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat((first, apart), dim=dim)


def converted(
    name: str, tensor: torch.Tensor, architecture: str = ""
) -> list[tuple[str, torch.Tensor]]:
    """As llama.cpp's converter leaves the tensors of layers with a recurrent state."""
    owner, _, own = name.rpartition(".")
    if name.endswith("in_proj_qkvz.weight"):
        rows = tensor.view(2, -1, tensor.shape[1])
        parts = rows.split([24, 24, 32, 32], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        layer = name.split(".")[2]
        qkv = torch.cat((q, k, v))
        return [(f"blk.{layer}.attn_qkv.weight", qkv), (f"blk.{layer}.attn_gate.weight", z)]
    if architecture.startswith("qwen35") and ".linear_attn." in name:
        tensor = value_heads_apart(name, tensor)
    if own == "A_log":
        return [(name, -tensor.exp() if tensor.dim() == 2 else -tensor.exp()[:, None])]
    if own == "D":
        return [(name, tensor if architecture in ("mamba", "jamba") else tensor[:, None])]
    if own == "dt_bias":
        return [(f"{owner}.dt_proj.bias", tensor)]
    if name.endswith((".correct_output_scale", ".layer_scalar")):
        return [(f"{name}.weight", tensor)]
    if name.endswith(".e_score_correction_bias"):
        return [(f"{owner}.e_score_correction.bias", tensor)]
    if name.endswith(".expert_bias"):
        return [(f"{name}.bias", tensor)]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return [(name, tensor.view(GROUPS, -1))]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return [(name, tensor.squeeze(1))]
    if "shared_mlp" in name:
        layer = name.partition(".shared_mlp")[0]
        parts = ("gate_proj", "up_proj") if "input" in name else ("down_proj",)
        chunks = tensor.chunk(len(parts))
        return [
            (f"{layer}.mlp.{part}.weight", one) for part, one in zip(parts, chunks, strict=True)
        ]
    return [(name, tensor)]
