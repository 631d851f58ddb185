"""GGUF files of each architecture, with the names that the gguf library has for its tensors and the
metadata that llama.cpp's converter writes: the same model as the folder it is made from.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_model
from transformers import AutoConfig

from piecework.runtime.loader.loader import load_model
from tests.runtime.gguf_models import add_metadata, finish, metadata_of
from tests.runtime.loaded_weights import loaded_weights

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
TIED = {"tie_word_embeddings": True}
GEMMA = {**TIED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", {**TIED, "head_dim": 32}, {}),
    "gemma2": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 4.0},
        {
            "attention.sliding_window": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "attention.sliding_window": 24,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "sliding_window": 24,
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"rope_type": "longrope", **FACTORS},
        },
        {
            "attention.sliding_window": 24,
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": 1.0954451150103321,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        {
            "sliding_window": 24,
            "layer_types": WINDOWS,
            "rope_parameters": {
                "full_attention": {**YARN, "original_max_position_embeddings": 1024},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 1024,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
        },
        {
            "embedding_scale": 12.0,
            "logit_scale": 16.0,
            "residual_scale": 0.25,
            "attention.scale": 0.125,
        },
    ),
    "smollm3": ("smollm3", {"rope_parameters": {"rope_theta": 5e6}}, {"rope.freq_base": 5e6}),
    "glm4": ("glm4", {"head_dim": 32}, {"rope.dimension_count": 16}),
    "cohere": (
        "command-r",
        {**TIED, "use_qk_norm": True, "logit_scale": 0.25},
        {"logit_scale": 0.25, "rope.freq_base": 5e5},
    ),
    "cohere2": (
        "cohere2",
        {**TIED, "sliding_window": 24},
        {"attention.sliding_window": 24, "logit_scale": 0.0625, "rope.dimension_count": 16},
    ),
}
_PERMUTED = ("granite", "smollm3")
"""Whose rows of q and k the converter puts into the order of pairs, as Llama's."""


def write(folder: Path, path: Path, architecture: str, extra: dict[str, Any]) -> None:
    """In float32, with metadata of the architecture in `extra` beside those that all have."""
    config = AutoConfig.from_pretrained(folder)
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config), **extra}.items():
        add_metadata(writer, f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1.0)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if architecture in _PERMUTED and heads is not None:
            pairs = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = pairs.reshape(array.shape)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        writer.add_tensor(ours, np.ascontiguousarray(array))
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in ("long", "short"):
        if factors := rope.get(f"{kind}_factor"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
    finish(writer)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_same_model_as_its_folder(tmp_path: Path, name: str) -> None:
    architecture, changes, extra = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", name, **changes)
    path = tmp_path / "model.gguf"
    write(folder, path, architecture, extra)
    file, whole = (
        load_model(str(each), torch.float32, torch.device("cpu"), False) for each in (path, folder)
    )
    ours, theirs = loaded_weights(file), loaded_weights(whole)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[each], tensor) for each, tensor in theirs.items())
    for each in file.model.rotaries[0].cos, file.model.rotaries[-1].signed_sin:
        assert any(torch.equal(each, other) for other in whole.buffers())
    layouts = [model.kv_layouts(torch.float32) for model in (file, whole)]
    assert layouts[0] == layouts[1]
    said, wanted = asdict(file.config), asdict(whole.config)
    others = {"architecture", "dtype", "rope_scaling", "rope_local_base_freq"}
    for each in said.keys() - others:
        assert said[each] == pytest.approx(wanted[each]), each
