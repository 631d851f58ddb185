"""Tiny models whose weights are packed as AWQ, GPTQ and compressed-tensors do it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from packed_layouts import Tensors, quantized, write_awq, write_gptq
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
"""The name and the weight [N, K] of a linear layer to what a checkpoint holds in its place, and its
values; None leaves it as it is.
"""


class PackedModel(NamedTuple):
    """A folder of quantised weights, and one of the same weights as numbers of 32 bits."""

    path: Path
    reference: Path


def write_packed_model(
    folder: Path,
    source: Path,
    config: dict[str, Any],
    write: Writer,
) -> PackedModel:
    """Of the model `source`."""
    packed, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        found = write(layer, tensor) if layer.endswith(("_proj", "lm_head")) else None
        if found is None:
            packed[name] = plain[name] = tensor
        else:
            packed |= {f"{layer}.{kind}": part for kind, part in found[0].items()}
            plain[name] = found[1].float()
    model = PackedModel(folder / "packed", folder / "reference")
    for path, tensors in zip(model, (packed, plain), strict=True):
        shutil.copytree(source, path)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
        )
    path = model.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return model


def group_index(columns: int, size: int, *, act_order: bool) -> torch.Tensor:
    """The group of each column, with act order in the same disorder for all layers of one width."""
    found = torch.arange(columns) // size
    disorder = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return found[disorder] if act_order else found


def awq(size: int) -> tuple[dict[str, Any], Writer]:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head":
            return None
        of = group_index(weight.shape[1], size, act_order=False)
        found = quantized(weight, 4, of, symmetric=False)
        return write_awq(found.numbers, found.scale, found.zero), found.values

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return config | {"zero_point": True, "modules_to_not_convert": None}, write


def gptq(
    bits: int, size: int, *, act_order: bool = False, sym: bool = True, version: int = 1,
    lm_head: bool = False, **others: Any,
) -> tuple[dict[str, Any], Writer]:  # fmt: skip
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head" and not lm_head:
            return None
        columns = weight.shape[1]
        of = group_index(columns, columns if size == -1 else size, act_order=act_order)
        found = quantized(weight, bits, of, symmetric=sym)
        numbers = found.numbers, found.scale, found.zero
        return write_gptq(*numbers, bits, g_idx=of, version=version), found.values

    form = {1: "gptq", 2: "gptq_v2"}[version]
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order}
    return config | {"sym": sym, "lm_head": lm_head, "checkpoint_format": form} | others, write


def compressed(
    bits: int, size: int, *, symmetric: bool = True, act_order: bool = False
) -> tuple[dict[str, Any], Writer]:
    """By the library; groups that are out of order, which it no longer writes, as it read them."""
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head":
            return None
        columns = weight.shape[1]
        of = group_index(columns, columns if size == -1 else size, act_order=act_order)
        found, half = quantized(weight, bits, of, symmetric=symmetric), 2 ** (bits - 1)
        state = {
            "weight": weight,
            "weight_scale": found.scale,
            "weight_zero_point": (found.zero - half).to(torch.int8),
        }
        written = PackedQuantizationCompressor.compress(state, scheme)
        if act_order:
            signed = (found.numbers - half).to(torch.int8)
            index = {"weight_packed": pack_to_int32(signed, bits), "weight_g_idx": of.int()}
            return written | index, found.values
        # The library computes in the scale's dtype.
        wide = written | {"weight_scale": found.scale.float()}
        return written, PackedQuantizationCompressor.decompress(wide, scheme)["weight"]

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    return config.model_dump(mode="json"), write


CASES: dict[str, tuple[tuple[dict[str, Any], Writer], str, dict[str, Any]]] = {
    "awq": (awq(32), "llama", {}),
    "awq-bias": (awq(16), "qwen2", {}),
    "gptq": (gptq(4, 32), "llama", {}),
    "gptq-asymmetric": (gptq(4, 32, sym=False), "qwen3", {}),
    "gptq-act-order": (gptq(4, 32, act_order=True, sym=False, version=2), "llama", {}),
    "gptq-8-act-order": (gptq(8, 32, act_order=True), "qwen2", {}),
    "gptq-8-rows-head": (gptq(8, -1, lm_head=True), "mistral", {}),
    "pack-4": (compressed(4, 32), "llama", {}),
    "pack-4-asymmetric": (compressed(4, 32, symmetric=False), "qwen3", {}),
    "pack-4-rows": (compressed(4, -1), "llama", {}),
    "pack-8-rows": (compressed(8, -1), "llama", {}),
    "pack-4-act-order": (compressed(4, 32, symmetric=False, act_order=True), "llama", {}),
    "pack-8-asymmetric": (compressed(8, 16, symmetric=False), "qwen2", {}),
}


def written(folder: Path, case: str) -> PackedModel:
    (config, write), architecture, overrides = CASES[case]
    source = make_tiny_model(folder / "source", architecture, **overrides)
    return write_packed_model(folder, source, config, write)
