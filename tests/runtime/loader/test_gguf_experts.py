"""GGUF files of models with experts that llama.cpp's converter brings into shapes of its own: the
same model as the folder that a file is made from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from tests.runtime.models.sizes import GROWING, INDEXED, KIMI, LATENT, YARN

CPU = torch.device("cpu")
ROUTED = {
    "expert_count": 8,
    "expert_shared_count": 2,
    "expert_used_count": 3,
    "expert_feed_forward_length": 48,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}
SPLIT = {
    **ROUTED,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 24,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 20,
    "rope.dimension_count": 16,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
INDEX = {
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 24,
    "attention.indexer.top_k": 16,
}
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True}
SCALED = {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek-v2": (
        "deepseek_v2",
        "deepseek2",
        {
            **LATENT,
            **SCALED,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "q_lora_rank": None,
        },
        {
            **SPLIT,
            **GROUPS,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "expert_gating_func": 1,
            "attention.q_lora_rank": None,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        "deepseek2",
        {
            **LATENT,
            "n_shared_experts": 2,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {**SPLIT, **GROUPS, **SIGMOID, "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "deepseek-v3, keys and values as one": (
        "deepseek_v3",
        "deepseek2",
        {**LATENT, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
        {
            **{key: value for key, value in SPLIT.items() if not key.startswith("rope.scaling")},
            **SIGMOID,
            "attention.key_length": 40,
            "attention.value_length": 20,
            "attention.key_length_mla": None,
            "attention.value_length_mla": None,
        },
    ),
    "deepseek-v3.2": (
        "deepseek_v32",
        "deepseek32",
        {
            **INDEXED,
            "n_shared_experts": 2,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {**SPLIT, **GROUPS, **SIGMOID, **INDEX, "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "glm5": (
        "glm_moe_dsa",
        "glm-dsa",
        {**INDEXED, "n_shared_experts": 2, "indexer_types": ["full", "shared", "full"]},
        {
            **{key: value for key, value in SPLIT.items() if not key.startswith("rope.scaling")},
            **GROUPS,
            **SIGMOID,
            **INDEX,
            "nextn_predict_layers": 1,
            "block_count": 4,
        },
    ),
    "glm4-moe": (
        "glm4_moe",
        "glm4moe",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
        {
            **ROUTED,
            **SIGMOID,
            "rope.dimension_count": 8,
            "nextn_predict_layers": 1,
            "block_count": 4,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        "kimi-linear",
        KIMI,
        {
            **{key: value for key, value in SPLIT.items() if not key.startswith("rope.scaling")},
            **GROUPS,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "attention.q_lora_rank": None,
            "attention.head_count_kv": [0, 1, 0],
            "kda.head_dim": 24,
            "ssm.conv_kernel": 4,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        "minimax-m2",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
        {
            "expert_count": 6,
            "expert_feed_forward_length": 96,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
        },
    ),
    "ministral3": (
        "ministral3",
        "mistral3",
        {"head_dim": 16, "rope_parameters": GROWING},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.3,
        },
    ),
    "llama4": (
        "llama4_text",
        "llama4",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
        },
        {
            "feed_forward_length": 80,
            "expert_count": 4,
            "expert_feed_forward_length": 48,
            "interleave_moe_layer_step": 2,
        },
    ),
}


def converted(folder: Path, config: Any, *, splits: bool) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint as llama.cpp's converter changes it, under names that its library maps."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        before, is_expert, rest = name.partition(".experts.")
        if is_expert and rest.partition(".")[0].isdecimal():
            number, _, projection = rest.partition(".")
            experts.setdefault(f"{before}.experts.{projection}", {})[int(number)] = array
        elif rest == "gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=-1), strict=True):
                yield f"{before}.experts.{part}_proj.weight", half.swapaxes(1, 2)
        elif rest == "down_proj":
            yield f"{name}.weight", array.swapaxes(1, 2)
        elif name.endswith("kv_b_proj.weight") and splits:
            heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), values
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), array
        elif name.endswith("A_log"):
            yield name, -np.exp(array)
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), array
        elif name.endswith("_conv1d.weight"):
            yield name, array[None]
        elif config.model_type == "kimi_linear" and rest == "" and name.endswith("_proj.weight"):
            # So are dense layers called where the model is published.
            yield re.sub(r"block_sparse_moe\.(?=\w+_proj)", "mlp.", name), array
        else:
            yield name, array
    for name, parts in experts.items():
        yield name, np.stack([parts[number] for number in range(len(parts))])


def write(folder: Path, path: Path, architecture: str, extra: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(folder)
    # The library's latest version knows the tensors of deepseek32 by this name alone.
    known = architecture if architecture != "deepseek32" else "glm-dsa"
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)
    writer = gguf.GGUFWriter(path, architecture)
    common = {key.replace("__", "."): value for key, value in metadata_of(config).items()}
    for key, value in {**common, **extra}.items():
        add_metadata(writer, f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    splits = extra.get("attention.key_length_mla") is not None
    for name, array in converted(folder, config, splits=splits):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if architecture == "mistral3" and heads is not None:
            pairs = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = pairs.reshape(array.shape)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        writer.add_tensor(ours, np.ascontiguousarray(array))
    if extra.get("nextn_predict_layers"):
        writer.add_tensor("blk.3.nextn.enorm.weight", np.ones(64, np.float32))
    finish(writer)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_same_model_as_its_folder(tmp_path: Path, name: str) -> None:
    model_type, architecture, changes, extra = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", model_type, **changes)
    path = tmp_path / "model.gguf"
    write(folder, path, architecture, extra)
    file, whole = (load_model(str(each), torch.float32, CPU, False) for each in (path, folder))
    ours, theirs = loaded_weights(file), loaded_weights(whole)
    assert set(ours) == set(theirs)
    for each, tensor in theirs.items():
        # Files hold -exp(A_log).
        same = torch.allclose if each.endswith("A_log") else torch.equal
        assert same(ours[each], tensor), each
    assert all(
        torch.equal(one, other) for one, other in zip(file.buffers(), whole.buffers(), strict=True)
    )
    layouts = [model.kv_layouts(torch.float32) for model in (file, whole)]
    assert layouts[0] == layouts[1]
    said, wanted = asdict(file.config), asdict(whole.config)
    for each in said.keys() - {"dtype", "rope_scaling", "mlp_layer_types"}:
        assert said[each] == pytest.approx(wanted[each]), each
