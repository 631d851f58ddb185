"""What is particular to MiniMax-Text-01 and M1: the names and members of their published files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantized_checkpoints import edit_config, said
from tiny_models import make_tiny_model

from piecework.runtime.config.model import ModelConfig
from tests.runtime.models.variants import OTHERS

KIND, MEMBERS = OTHERS["minimax"]


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("MiniMaxText01ForCausalLM", "minimax_text_01"),
        ("MiniMaxM1ForCausalLM", "minimax_m1"),
    ],
)
def test_files_of_minimax_say_what_those_of_transformers_say(
    architecture: str, model_type: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, KIND, **MEMBERS)
    expected = said(folder)
    content = json.loads((folder / "config.json").read_text())
    for place in ("full_attn", "linear_attn", "mlp"):
        for factor in ("alpha", "beta"):
            value = content.pop(f"{place}_{factor}_factor")
            theirs = place.replace("attn", "attention")
            content[f"layernorm_{theirs}_{factor}"] = value
    kinds = content.pop("layer_types")
    content["attn_type_list"] = [int(kind == "full_attention") for kind in kinds]
    content |= {"architectures": [architecture], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(content))
    assert said(folder) == expected


def test_rotary_dim_is_the_part_of_a_head_that_is_turned(tmp_path: Path) -> None:
    """In MiniMax's code; transformers 5.24 turns whole heads."""
    folder = make_tiny_model(tmp_path, KIND, **MEMBERS)
    whole = said(folder)
    edit_config(folder, rotary_dim=8)
    assert ModelConfig.from_pretrained(folder).rotary_dim == 8
    assert said(folder) != whole


def test_an_expert_of_all_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, KIND, **MEMBERS)
    edit_config(folder, shared_intermediate_size=32)
    with pytest.raises(ValueError, match=r"shared_intermediate_size.*choose another model"):
        ModelConfig.from_pretrained(folder)
