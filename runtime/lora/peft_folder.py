"""Reads adapters in PEFT's format: a folder with adapter_config.json and
adapter_model.safetensors.

Names and defaults: peft/tuners/lora/config.py and peft/utils/save_and_load.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import regex

from ..files.folder import read_json
from ..layers.linear import StoredTensor
from ..loader.safetensors import tensors_of
from .adapter import AdapterFault
from .stored import StoredAdapter, StoredUpdate

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_SECONDS = 1.0  # Time that a pattern of the file may take.

# Members that change what is computed, by the reason why they are refused.
_REFUSED = {
    "use_dora": "DoRA normalises the rows of the merged weight, which a base model that is shared "
    "by several adapters does not have; merge it into the model, or train without use_dora",
    "use_qalora": "QA-LoRA pools the input before the adapter; train without use_qalora",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a text; train without "
    "alora_invocation_tokens",
    "layer_replication": "it repeats layers of the base model; save the whole model instead",
    "modules_to_save": "it replaces whole layers of the base model; merge it into the model, or "
    "train without modules_to_save",
    "trainable_token_indices": "it changes the embedding; train without trainable_token_indices",
    "target_parameters": "it changes experts, which adapters cannot change here; leave them out",
    "lora_bias": "it adds a bias; train with lora_bias false",
    "arrow_config": "it chooses among several adapters; give one of them",
    "use_bdlora": "block-diagonal LoRA is not supported; train without use_bdlora",
    "kasa_config": "KaSA is not supported; train without kasa_config",
    "monteclora_config": "MonteCLoRA is not supported; train without monteclora_config",
    "velora_config": "VeLoRA is not supported; train without velora_config",
}


class _Scales(NamedTuple):
    """How PEFT scales the update of a layer."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    takes_root: bool

    def rank_of(self, name: str) -> int:
        return int(_by_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        divisor = math.sqrt(rank) if self.takes_root else rank
        return float(_by_pattern(self.alphas, name, self.alpha)) / divisor


def is_peft(path: Path) -> bool:
    """Whether a folder holds an adapter in this format."""
    return (path / CONFIG).is_file()


def read_peft(path: Path) -> StoredAdapter:
    """Return the adapter of a folder. Only headers are read. Raise `AdapterFault`."""
    config = _read_config(path / CONFIG)
    weights = path / _WEIGHTS
    if not weights.is_file():
        if (path / _PICKLED).is_file():
            raise AdapterFault(
                f"{path} holds {_PICKLED}, a pickle, which can run code when it is read; save the "
                "adapter as safetensors (save_pretrained of PEFT 0.5 or later)"
            )
        raise AdapterFault(f"{path} lacks {_WEIGHTS}; download the adapter again")
    try:
        tensors = tensors_of(weights)
    except (ValueError, OSError) as error:
        raise AdapterFault(str(error)) from None
    except RuntimeError as error:  # The library cannot map a large file.
        raise AdapterFault(f"{weights} cannot be opened ({error})") from None
    return StoredAdapter(path, _pair_up(path, config, tensors))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except (ValueError, OSError) as error:
        raise AdapterFault(f"{path} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise AdapterFault(f"{path} is no JSON object; download the adapter again")
    if config.get("peft_type") != "LORA":
        raise AdapterFault(
            f"{path}: peft_type is {config.get('peft_type')!r:.50}, but only LORA is supported"
        )
    for member, reason in _REFUSED.items():
        if config.get(member):
            raise AdapterFault(f"{path}: {member} is set: {reason}")
    if config.get("bias", "none") != "none":
        raise AdapterFault(
            f"{path}: bias is {config['bias']!r:.50}: biases of the base model are shared by all "
            "adapters; train with bias none"
        )
    return config


def _scales_of(path: Path, config: dict[str, Any]) -> _Scales:
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    for member, value in (
        ("r", rank),
        ("lora_alpha", alpha),
        *(("rank_pattern", each) for each in _values(path, "rank_pattern", ranks)),
        *(("alpha_pattern", each) for each in _values(path, "alpha_pattern", alphas)),
    ):
        is_number = type(value) is int or (type(value) is float and member.startswith(("l", "a")))
        if not is_number or not 0 < value < 2**20:
            raise AdapterFault(f"{path / CONFIG}: {member} is {value!r:.50}, not a positive number")
    return _Scales(rank, alpha, ranks, alphas, bool(config.get("use_rslora")))


def _values(path: Path, member: str, pattern: Any) -> list[Any]:
    if not isinstance(pattern, dict):
        raise AdapterFault(f"{path / CONFIG}: {member} is no object of names and numbers")
    return list(pattern.values())


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that the end of a name matches, as PEFT does."""
    for pattern, value in patterns.items():
        try:
            if regex.match(rf"(.*\.)?({pattern})$", name, timeout=_SECONDS):
                return value
        except (regex.error, TimeoutError) as error:
            raise AdapterFault(f"{CONFIG}: the pattern {pattern!r:.80} fails: {error}") from None
    return default


def _pair_up(path: Path, config: dict[str, Any], tensors: list[StoredTensor]) -> list[StoredUpdate]:
    scales = _scales_of(path, config)
    halves: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        stem, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        if (
            not tensor.name.startswith(_PREFIX)
            or not tensor.name.endswith(".weight")
            or kind not in ("lora_A", "lora_B")
        ):
            raise AdapterFault(
                f"{path} holds the tensor {tensor.name!r:.200}, which is no lora_A or lora_B of a "
                "linear layer; embeddings and magnitudes of adapters are not supported"
            )
        halves.setdefault(stem.removeprefix(_PREFIX), {})[kind] = tensor
    if not halves:
        raise AdapterFault(f"{path} holds no tensors; download the adapter again")
    updates = []
    for name, both in halves.items():
        if len(both) < 2:
            lacking = "lora_A" if "lora_B" in both else "lora_B"
            raise AdapterFault(f"{path} lacks {lacking} of {name:.200}; download it again")
        a, b, rank = both["lora_A"], both["lora_B"], scales.rank_of(name)
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            raise AdapterFault(
                f"{path}: lora_A and lora_B of {name:.200} have shapes {list(a.shape)} and "
                f"{list(b.shape)}, but {CONFIG} gives rank {rank}"
            )
        updates.append(StoredUpdate(name, a, b, scales.scale_of(name)))
    return updates
