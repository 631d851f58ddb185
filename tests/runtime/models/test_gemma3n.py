"""Gemma 3n: layers that share keys and values, and two tables of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import edit_config, said
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.cache.pool import KVPool, shared_pages
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.loader.loader import load_model
from tests.runtime.loader.test_gguf_models import MODELS, Kind, write
from tests.runtime.models.sizes import GEMMA3N

CPU = torch.device("cpu")
UNEVEN = {**GEMMA3N, "intermediate_size": [96, 64, 96, 128, 96]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models"), "gemma3n_text", **UNEVEN)


def test_layers_that_share_keys_and_values_keep_none(folder: Path) -> None:
    model = load_model(str(folder), torch.float32, CPU, False)
    layouts = model.kv_layouts(torch.float32)
    assert [layout.shares for layout in layouts] == [None, None, None, 1, 2]
    assert [layout.token_bytes for layout in layouts] == [2 * 2 * 32 * 4] * 3 + [0] * 2
    shared = shared_pages(layouts, 24)
    for settings in ({}, {"window": 24, "shared": shared, "num_slabs": 3}):
        pool = KVPool(layouts, num_pages=3, page_size=4, platform=CpuPlatform(), **settings)
        for caches in (pool.k, pool.v):
            assert [each.data_ptr() for each in caches[3:]] == [
                each.data_ptr() for each in caches[1:3]
            ]


def test_the_text_of_a_model_for_images_and_sound_is_served(folder: Path, tmp_path: Path) -> None:
    """Its checkpoint also has towers, and keys and values of layers that read those of others."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    text = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    attention = "model.language_model.layers.4.self_attn"
    unused = {f"{attention}.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj")}
    towers = ("audio_tower.conformer.0.w", "vision_tower.w", "embed_audio.w", "embed_vision.w")
    others = {f"model.{name}": torch.ones(1) for name in towers}
    save_file({**text, **unused, **others}, tmp_path / "model.safetensors")
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    edit_config(
        tmp_path,
        architectures=["Gemma3nForConditionalGeneration"],
        model_type="gemma3n",
        text_config=content,
    )
    assert said(tmp_path) == said(folder)


@pytest.mark.parametrize("cache", ["fp8_e4m3", "int8"])
def test_a_cache_of_fewer_bits_says_about_the_same(folder: Path, cache: str) -> None:
    exact, rounded = said(folder), said(folder, kv_cache_dtype=cache, chunked_prefill_size=16)
    pairs = [pair for rows in zip(exact, rounded, strict=True) for pair in zip(*rows, strict=True)]
    assert 0 < sum(abs(one - other) for one, other in pairs) / len(pairs) < 0.3


def test_both_tables_of_embeddings_stay_packed(tmp_path: Path) -> None:
    """One of them is the tied head's too, and the other one is not."""
    architecture, changes, extra = MODELS["gemma3n_text"]
    wide = {"hidden_size_per_layer_input": 32}
    folder = make_tiny_model(tmp_path / "model", "gemma3n_text", **{**changes, **wide})
    path = tmp_path / "model.gguf"
    told = {**extra, "embedding_length_per_layer_input": 32}
    write(folder, path, architecture, told, Kind.Q8_0)
    packed, widened = (
        load_model(str(path), torch.bfloat16, CPU, False, kernels, quantization="auto")
        for kernels in (native_linear(), None)
    )
    assert packed.model.embed_tokens.kind == packed.model.embed_tokens_per_layer.kind == "Q8_0"
    ids = torch.arange(0, 512, 7)
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        rows = [getattr(model.model, name)(ids) for model in (packed, widened)]
        assert torch.equal(*rows), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, but some of those of 5 layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, but some of those of 5 layers"),
        ({"altup_active_idx": 3}, "altup_active_idx is 3 and altup_num_inputs is 3"),
        ({"intermediate_size": [96]}, "intermediate_size must have a number for each layer"),
        ({"intermediate_size": [96, 0, 96, 96, 96]}, "must be whole numbers above 0, got 0"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "from 0 to below 1"),
    ],
)
def test_numbers_that_make_no_model_are_told(
    folder: Path, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_pretrained(tmp_path)
