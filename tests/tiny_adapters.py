"""Random adapters (LoRA) for tiny models, written as PEFT writes them, and what they compute."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

_PREFIX = "base_model.model."
# Names of projections in the models of the tests, without experts and routers.
_PROJECTIONS = re.compile(
    r"(q|k|v|o|gate|up|down|gate_up|qkv|dense|query_key_value|fc1|fc2|c_attn|c_proj|c_fc|W_pack"
    r"|dense_h_to_4h|dense_4h_to_h|out|in)(_proj)?$"
)


def adapted_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Rows and columns of the layers that `make_adapter` changes, by name."""
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if "expert" in name or not _PROJECTIONS.fullmatch(last) or "router" in name:
            continue
        if isinstance(module, nn.Linear):
            found[name] = module.out_features, module.in_features
    return found


def make_adapter(
    path: Path,
    model_path: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    size: float = 0.3,
    choose: Callable[[str], bool] = lambda name: True,
    dtype: torch.dtype = torch.float32,
    **members: Any,
) -> Path:
    """Write an adapter of all projections that `choose` accepts. Same arguments, same matrices.

    `members` are further members of adapter_config.json. `rank_pattern` decides ranks.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in adapted_layers(model).items():
        if not choose(name):
            continue
        own = next(
            (
                value
                for pattern, value in members.get("rank_pattern", {}).items()
                if re.match(rf"(.*\.)?({pattern})$", name)
            ),
            rank,
        )
        a = torch.randn(own, columns, generator=generator) * size / math.sqrt(columns)
        b = torch.randn(rows, own, generator=generator) * size
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    names = sorted({name.split(".")[-3] for name in tensors})
    (path / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": names} | members)
    )
    return path


def merged_model(model_path: Path, adapter: Path | None) -> nn.Module:
    """Return transformers' model in float32, with an adapter of `make_adapter` in its weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in {each.removeprefix(_PREFIX).rpartition(".lora_")[0] for each in tensors}:
        a, b = (tensors[f"{_PREFIX}{name}.lora_{half}.weight"].float() for half in "AB")
        alpha = next(
            (
                value
                for pattern, value in config.get("alpha_pattern", {}).items()
                if re.match(rf"(.*\.)?({pattern})$", name)
            ),
            config["lora_alpha"],
        )
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        weight: torch.Tensor = model.get_submodule(name).weight.data
        update = scale * (b @ a)
        weight += update
    return model


def peft_model(model_path: Path, adapter: Path) -> nn.Module:
    """Return transformers' model in float32 with an adapter, as PEFT computes it."""
    import peft  # Here, because other tests need not wait for it.

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adapted: nn.Module = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    return adapted


@torch.inference_mode()
def logprobs_after(model: nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [tokens, V] of what follows each place of an answer."""
    ids = torch.tensor([prompt + tokens])
    logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)
