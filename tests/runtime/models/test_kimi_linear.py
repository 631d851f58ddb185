"""What is particular to Kimi Linear: the members of its published file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized_checkpoints import edit_config, said
from tiny_models import make_tiny_model

from piecework.runtime.config.model import ModelConfig
from tests.runtime.models.sizes import KIMI


def test_the_published_members_say_what_those_of_transformers_say(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "kimi_linear", **KIMI)
    expected = said(folder)
    content = json.loads((folder / "config.json").read_text())
    content["linear_attn_config"] = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": content.pop("linear_head_dim"),
        "num_heads": content.pop("linear_num_heads"),
        "short_conv_kernel_size": content.pop("linear_conv_kernel_dim"),
    }
    kinds = content.pop("mlp_layer_types")
    content["first_k_dense_replace"] = kinds.count("dense")
    del content["layer_types"]
    (folder / "config.json").write_text(json.dumps(content))
    assert said(folder) == expected


@pytest.mark.parametrize(
    ("member", "value"), [("mla_use_nope", False), ("moe_router_activation_func", "softmax")]
)
def test_what_is_computed_otherwise_is_refused(tmp_path: Path, member: str, value: Any) -> None:
    folder = make_tiny_model(tmp_path, "kimi_linear", **KIMI)
    edit_config(folder, **{member: value})
    with pytest.raises(ValueError, match=rf"{member} is {value!r}.*choose another model"):
        ModelConfig.from_pretrained(folder)
