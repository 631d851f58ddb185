"""Numbers of experts that no model has are refused before a list is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.runtime.loader.loader import load_model

SHAPE = {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"num_local_experts": 10**12}, "1000000000000 experts a layer are more than 4096"),
    "more a token than there are": ({"num_experts_per_tok": 5}, "5 of 4 experts a token"),
    "none a token": ({"num_experts_per_tok": 0}, "0 of 4 experts a token"),
    "no columns": ({"moe_intermediate_size": 0}, "experts of 0 columns"),
    "no number": ({"num_local_experts": "4"}, "num_local_experts must be a whole number"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    return make_tiny_model(path, "qwen3_moe", num_hidden_layers=1, **SHAPE)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    changes, line = WRONG[name]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=line):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"), False)
