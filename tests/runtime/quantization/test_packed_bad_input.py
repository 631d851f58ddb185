"""Packed checkpoints that contradict themselves, or are of kinds that are not served, are refused
in one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_models import written
from safetensors.torch import load_file, save_file

from piecework.runtime.loader.loader import load_model
from piecework.runtime.quantization.methods import linear_kinds

DOWN, QUERY = "model.layers.1.mlp.down_proj.", "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cases = ("awq", "gptq-act-order", "pack-4-asymmetric")
    return {case: written(tmp_path_factory.mktemp("model"), case).path for case in cases}


def load(path: Path) -> Any:
    return load_model(str(path), torch.float32, torch.device("cpu"), False, quantization="auto")


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message and (str(path) in message or "quantization_config" in message)
    return message


def edited(
    folder: Path,
    tmp_path: Path,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """A copy of a checkpoint, with members of its quantization_config and tensors changed."""
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= config or {}
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("case", "config", "said"),
    [
        ("awq", {"version": "gemv"}, "supported: 4 bits in the version gemm"),
        ("awq", {"bits": 8}, "supported: 4 bits in the version gemm"),
        ("awq", {"group_size": 40}, "groups of 40 columns do not divide rows of 64"),
        ("awq", {"group_size": 0}, "group_size must be -1 or more than 0, got 0"),
        ("awq", {"group_size": "128"}, "group_size must be a whole number"),
        ("awq", {"group_size": 16}, "qzeros has shape"),
        ("gptq-act-order", {"bits": 3}, "GPTQ of 3 bits"),
        ("gptq-act-order", {"checkpoint_format": "marlin"}, "formats gptq and gptq_v2"),
        ("gptq-act-order", {"checkpoint_format": ["gptq"]}, "formats gptq and gptq_v2"),
        ("gptq-act-order", {"pack_dtype": "int64"}, "packed in int32"),
        ("gptq-act-order", {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "multiplied as one"),
        ("gptq-act-order", {"dynamic": {"+:(": {}}}, "no valid pattern"),
        ("gptq-act-order", {"dynamic": {str(i): {} for i in range(200)}}, "more than 100 rules"),
    ],
)
def test_schemes_that_are_not_served_name_what_is(
    folders: dict[str, Path], tmp_path: Path, case: str, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(edited(folders[case], tmp_path, config))


def set_to(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


def wide(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {name: tensors[name].double()}


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("awq", set_to(DOWN + "scales", float("nan")), "holds NaN or infinity"),
        ("awq", set_to(DOWN + "scales", 0.0), "holds 0"),
        ("awq", lambda tensors: tensors.pop(DOWN + "qzeros"), "lacks 1 tensors"),
        ("gptq-act-order", lambda tensors: tensors.pop(DOWN + "g_idx"), "lacks 1 tensors"),
        ("awq", lambda tensors: tensors.update(wide(tensors, DOWN + "scales")), "as float64"),
        ("gptq-act-order", set_to(DOWN + "g_idx", 3), "names groups other than the 3"),
        ("gptq-act-order", set_to(DOWN + "g_idx", -1), "names groups other than the 3"),
        (
            "gptq-act-order",
            lambda tensors: tensors[DOWN + "g_idx"].fill_(2),
            "each of 3 groups 32 columns",
        ),
        (
            "gptq-act-order",
            lambda tensors: tensors.update({QUERY + "g_idx": tensors[QUERY + "g_idx"].flip(0)}),
            "another order than those of q_proj",
        ),
        (
            "gptq-act-order",
            lambda tensors: tensors.update({DOWN + "bias": torch.ones(64)}),
            "is a bias",
        ),
        ("pack-4-asymmetric", set_to(DOWN + "weight_scale", float("inf")), "holds NaN or infinity"),
        (
            "pack-4-asymmetric",
            lambda tensors: tensors[DOWN + "weight_shape"].fill_(8),
            "[8, 8], but the model asks for [64, 96]",
        ),
        (
            "pack-4-asymmetric",
            lambda tensors: tensors.update(
                {DOWN + "weight_packed": tensors[DOWN + "weight_packed"].float()}
            ),
            "is stored as float32",
        ),
    ],
)
def test_tensors_that_contradict_the_scheme_are_named(
    folders: dict[str, Path],
    tmp_path: Path,
    case: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
) -> None:
    assert said in refusal(edited(folders[case], tmp_path, change=change))


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """AutoGPTQ gives every layer one."""
    path = edited(
        folders["gptq-act-order"],
        tmp_path,
        change=lambda tensors: tensors.update({DOWN + "bias": torch.zeros(64)}),
    )
    assert load(path).model.layers[1].mlp.down_proj.bias is None


def test_rules_of_gptqmodel_are_followed(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of the layers whose names match: the first rule that does."""

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(DOWN)]:
            del tensors[name]
        tensors[DOWN + "weight"] = torch.zeros(64, 96)

    rules = {r"-:.*\.1\.mlp\.down": {}, r".*down_proj": {"group_size": 32}}
    path = edited(folders["gptq-act-order"], tmp_path, {"dynamic": rules, "group_size": 64}, widen)
    with pytest.raises(ValueError, match="qzeros"):
        load(path)
    path = edited(folders["gptq-act-order"], tmp_path, {"dynamic": rules}, widen)
    kinds = linear_kinds(load(path))
    assert kinds["model.layers.0.mlp.down_proj"].startswith("weight_only 4 32")
    assert "model.layers.1.mlp.down_proj" not in kinds
