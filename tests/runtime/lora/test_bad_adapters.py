"""Adapters that cannot be used are refused with a reason, before memory is taken for them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.runtime.loader.loader import load_model
from piecework.runtime.lora.adapter import AdapterFault
from piecework.runtime.lora.reading import read_adapter
from piecework.runtime.lora.targets import Targets

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def targets(base: Path) -> Targets:
    return Targets(load_model(str(base), torch.float32, torch.device("cpu"), False))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", base, rank=4)


def configured(**members: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | members))

    return change


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return rewrite


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def huge(folder: Path) -> None:
    """A header that promises 100 GB, in a sparse file of that size."""
    size = 100 << 30
    entry = {"dtype": "F32", "shape": [size // 4 // 64, 64], "data_offsets": [0, size]}
    header = json.dumps({f"{Q}.lora_A.weight": entry}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (configured(r=3), "have shapes .* but adapter_config.json gives rank 3"),
    "dora": (configured(use_dora=True), "use_dora is set: DoRA normalises"),
    "saved": (configured(modules_to_save=["lm_head"]), "modules_to_save is set: it replaces"),
    "bias": (configured(bias="all"), "bias is 'all'"),
    "experts": (configured(target_parameters=["a"]), "target_parameters is set"),
    "activated": (configured(alora_invocation_tokens=[1]), "alora_invocation_tokens is set"),
    "kind": (configured(peft_type="IA3"), "peft_type is 'IA3', but only LORA"),
    "zero": (configured(r=0), "r is 0, not a positive number"),
    "alpha": (configured(lora_alpha="8"), "lora_alpha is '8', not a positive number"),
    "pattern": (configured(rank_pattern={"(": 2}), r"the pattern '\(' fails"),
    "patterns": (configured(rank_pattern=[2]), "rank_pattern is no object"),
    "json": (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read"),
    "list": (lambda folder: (folder / CONFIG).write_text("[]"), "is no JSON object"),
    "pickle": (pickled, "a pickle, which can run code"),
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), f"lacks {WEIGHTS}"),
    "cut": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 9), "cut off or broken"),
    "huge": (huge, "lacks lora_B|cannot be opened"),
    "half": (stored(lambda held: held.pop(f"{Q}.lora_B.weight")), "lacks lora_B of model.layers.0"),
    "name": (
        stored(lambda held: held.update({"embedding": torch.ones(2)})),
        "'embedding', which is no lora_A or lora_B",
    ),
    "layer": (
        stored(
            lambda held: held.update(
                {
                    f"{Q}x.lora_A.weight": torch.ones(4, 64),
                    f"{Q}x.lora_B.weight": torch.ones(64, 4),
                }
            )
        ),
        "the model has no layer model.layers.0.self_attn.q_projx",
    ),
    "head": (
        stored(
            lambda held: held.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.ones(512, 4),
                }
            )
        ),
        "the adapter changes lm_head; adapters may change",
    ),
    "shape": (
        stored(lambda held: held.update({f"{Q}.lora_B.weight": torch.ones(48, 4)})),
        "as a layer of 48 rows and 64 columns, but this model's has 64 and 64",
    ),
    "nan": (
        stored(lambda held: held[f"{Q}.lora_A.weight"].fill_(float("nan"))),
        "numbers that are not finite",
    ),
    "infinite": (
        stored(lambda held: held[f"{Q}.lora_B.weight"].fill_(float("inf"))),
        "numbers that are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reason_is_given(fault: str, adapter: Path, targets: Targets) -> None:
    change, reason = FAULTS[fault]
    change(adapter)
    with pytest.raises(AdapterFault, match=reason) as caught:
        read_adapter(str(adapter), targets, torch.float32, 16)
    assert "\n" not in str(caught.value) and caught.value.code == "invalid_adapter"


def test_a_rank_above_the_limit_names_the_flag(adapter: Path, targets: Targets) -> None:
    with pytest.raises(AdapterFault, match=r"has rank 4, more than 3: .* --max-lora-rank 4"):
        read_adapter(str(adapter), targets, torch.float32, 3)


def test_what_is_no_adapter_is_refused(base: Path, targets: Targets, tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none", "does not exist"),
        (base, "holds no adapter: it lacks adapter_config.json"),
        (base / "model.safetensors", "is neither a folder of PEFT nor a .gguf file"),
    ):
        with pytest.raises(AdapterFault, match=reason):
            read_adapter(str(path), targets, torch.float32, 16)


def test_other_contents_are_another_identity(base: Path, targets: Targets, tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        return read_adapter(str(path), targets, torch.float32, 16).identity

    first, second = (make_adapter(tmp_path / f"{seed}", base, seed=seed) for seed in (1, 2))
    same = make_adapter(tmp_path / "same", base, seed=1)
    scaled = make_adapter(tmp_path / "scaled", base, seed=1, alpha=9)
    assert identity(first) == identity(same)
    assert len({identity(first), identity(second), identity(scaled)}) == 3
