"""Tiny quantised checkpoints, and what transformers says of the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

PROMPTS = [[(31 * i + 7 * j * j) % 500 for j in range(n)] for i, n in enumerate((40, 13))]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
INPUT_SCALES = {"down_proj": 0.02, "o_proj": 0.01}
"""Static ones by the last name of a layer; others have 0.01 times the length of that name."""

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT = {"num_bits": 8, "type": "int", "symmetric": True}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
TOKEN, STATIC = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
FP8, INT8 = "float-quantized", "int-quantized"
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8-channel-token": (FP8, FLOAT | {"strategy": "channel"}, FLOAT | TOKEN),
    "fp8-tensor-token": (FP8, FLOAT | {"strategy": "tensor"}, FLOAT | TOKEN),
    "fp8-tensor-static": (FP8, FLOAT | {"strategy": "tensor"}, FLOAT | STATIC),
    "fp8-channel-static": (FP8, FLOAT | {"strategy": "channel"}, FLOAT | STATIC),
    "fp8-block-group": (FP8, FLOAT | BLOCKS, FLOAT | GROUP),
    "int8-channel-token": (INT8, INT | {"strategy": "channel"}, INT | TOKEN),
    "int8-tensor-token": (INT8, INT | {"strategy": "tensor"}, INT | TOKEN),
    "int8-channel-static": (INT8, INT | {"strategy": "channel"}, INT | STATIC),
}
"""Formats, weights and activations of compressed-tensors."""


def make_compressed(
    path: Path,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    *,
    form: str,
    ignore: tuple[str, ...] = ("lm_head",),
    targets: tuple[str, ...] = ("Linear",),
    **config: Any,
) -> Path:
    """A folder that the library itself has written."""
    source = make_tiny_model(path / "source", **SIZES | {"initializer_range": 0.05} | config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    scheme = QuantizationScheme(
        targets=list(targets),
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
        format=form,
    )
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=list(ignore), format=form
    )
    apply_quantization_config(model, quantization, show_progress=False)
    for name, layer in model.named_modules():
        if hasattr(layer, "weight_scale"):
            _observe(layer, scheme.weights)
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(input_scale(name))
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    folder = path / "model"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    compressor.update_config(folder)
    return folder


def input_scale(name: str) -> float:
    last = name.rpartition(".")[2]
    return INPUT_SCALES.get(last, 0.01 * len(last))


def _observe(layer: nn.Module, args: QuantizationArgs) -> None:
    """Scales of the weights' largest numbers."""
    weight = layer.weight.data
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = nn.functional.pad(
            weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        )
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin(), weight.amax()
    scale, zero = calculate_qparams(low, high, args)
    layer.weight_scale.data.copy_(scale)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data.copy_(zero)


def make_fp8(path: Path, *, block: bool, static: bool = False, **config: Any) -> Path:
    """As published checkpoints of `quant_method` fp8 are: Llama's, or DeepSeek's and Qwen3's."""
    folder = make_tiny_model(path / "model", **SIZES | {"initializer_range": 0.05} | config)
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_quantised = name.endswith(("_proj.weight", "_mqa.weight", "wq_b.weight", "wk.weight"))
        if not is_quantised or name.endswith("weights_proj.weight"):
            found[name] = weight
            continue
        prefix = name.removesuffix("weight")
        if block:
            rows, columns = weight.shape
            padded = nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
            blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            found[prefix + "weight_scale_inv"] = scale
        else:
            scale = wide = weight.abs().amax() / 448
            found[prefix + "weight_scale"] = scale
        found[name] = (weight / wide).to(torch.float8_e4m3fn)
        if static:
            found[prefix + "input_scale"] = torch.tensor(input_scale(prefix.rstrip(".")))
    save_file(found, folder / "model.safetensors")
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "static" if static else "dynamic",
            **({"weight_block_size": [128, 128]} if block else {}),
        },
    )
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reference(
    folder: Path,
    dequantise: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    quantise_input: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    quantised: Callable[[str], bool] | None = None,
) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocab] of `PROMPTS` in float32 by transformers, on weights that
    `dequantise` makes of a layer's tensors; `quantise_input(layer, x)`: what a quantised layer's
    input becomes; `quantised`: which layers are, by default those of several tensors.
    """
    source = json.loads((folder / "config.json").read_text())
    source.pop("quantization_config", None)
    tied = source.pop("tie_word_embeddings")
    plain = folder.parent / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(source | {"tie_word_embeddings": False}))
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, last = name.rpartition(".")
        layers.setdefault(layer, {})[last] = tensor
    if tied:
        layers["lm_head"] = dict(layers["model.embed_tokens"])
    is_quantised = quantised or (lambda name: len(layers.get(name, {})) > 1)
    chosen = {name for name in layers if is_quantised(name)}
    weights = {}
    for name, tensors in layers.items():
        bias = {f"{name}.bias": tensors.pop("bias")} if "bias" in tensors else {}
        weights |= bias
        weights[f"{name}.weight"] = dequantise(tensors) if name in chosen else tensors["weight"]
    weights = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, module in model.named_modules():
        if quantise_input and name in chosen:
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: (quantise_input(name, inputs[0]), *inputs[1:])
            )
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in PROMPTS]


def said(folder: Path, **settings: Any) -> list[list[float]]:
    """Log-probabilities of the second and every later token of `PROMPTS`."""
    settings = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 1024} | settings
    llm = LLM(str(folder), **settings)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0)
    return [
        [entry.logprob for entry in done.prompt_logprobs or [] if entry is not None]
        for done in llm.generate(PROMPTS, params)
    ]


def differences(expected: list[torch.Tensor], got: list[list[float]]) -> list[float]:
    """The smallest first."""
    return sorted(
        abs(row[ids[place + 1]].item() - own)
        for rows, ids, values in zip(expected, PROMPTS, got, strict=True)
        for place, (row, own) in enumerate(zip(rows, values, strict=False))
    )
