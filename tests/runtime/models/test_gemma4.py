"""Gemma 4: heads of two sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from tiny_vision import make_tiny_vision

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.model_registry import ModelCode
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.build import build_engine
from piecework.runtime.llm import LLM
from piecework.runtime.loader.loader import load_model
from tests.runtime.models.sizes import GEMMA4, GEMMA4_LARGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"), "gemma4_text", **GEMMA4)


def test_layers_keep_heads_of_their_own_size(folder: Path, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    layouts = load_model(str(folder), torch.float32, cpu, False).kv_layouts(torch.float32)
    assert [layout.key_size for layout in layouts] == [16, 16, 32] * 2
    assert [layout.shares for layout in layouts] == [None] * 4 + [3, 2]
    large = make_tiny_model(tmp_path, "gemma4_text", **GEMMA4_LARGE)
    layouts = load_model(str(large), torch.float32, cpu, False).kv_layouts(torch.float32)
    assert [layout.num_kv_heads for layout in layouts] == [2, 2, 1]


def test_older_and_newer_files_say_the_sizes_in_two_ways(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    assert content.pop("per_layer_config")
    (tmp_path / "config.json").write_text(json.dumps(content | {"global_head_dim": 32}))
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, but some of those of 6 layers"),
        ({"use_bidirectional_attention": "all"}, "must be null or vision, got 'all'"),
        ({"enable_moe_block": True}, "num_experts must be a whole number, got None"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "the same sizes for all layers with full"),
        ({"per_layer_config": {"2": 1, "5": 1}}, "the same sizes for all layers with full"),
        ({"sliding_window": None}, "it has no sliding_window"),
    ],
)
def test_what_is_no_gemma_4_of_ours_is_refused(
    folder: Path, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_pretrained(tmp_path, code=ModelCode("piecework"))


def test_images_for_code_that_takes_texts_alone_are_refused(tmp_path: Path) -> None:
    """Transformers' code computes the activation. Its forward would leave the images out."""
    activation = {"hidden_activation": "tanh"}
    folder = make_tiny_vision(tmp_path, "gemma4-large", text_config=activation)
    with pytest.raises(ValueError, match="takes texts alone; add --disable-vision"):
        build_engine(EngineConfig(model_path=str(folder), max_total_tokens=512), progress=False)
    llm = LLM(str(folder), max_total_tokens=512, disable_vision=True, num_threads=1)
    (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert len(answer.token_ids) == 2
