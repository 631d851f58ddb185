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

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.files.gguf_reader import open_gguf
from piecework.runtime.layers.linear import StoredTensor
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.checkpoint import reordered
from tests.runtime.converted_tensors import GROUPS, by_kind_of_head, converted
from tests.runtime.gguf_models import add_metadata, experts, finish, metadata_of
from tests.runtime.loaded_weights import loaded_weights
from tests.runtime.models.sizes import DELTA, GEMMA3N, GEMMA4, GEMMA4_LARGE
from tests.split_models import answer, assert_alike, load

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
TIED = {"tie_word_embeddings": True}
GEMMA = {**TIED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": GROUPS, "mamba_d_state": 24}
HYBRID = {**MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
FIRST_MAMBA = {"state_size": 24, "time_step_rank": 4, "intermediate_size": 128}
SSM_OF_FIRST = {
    **SSM,
    "ssm.group_count": None,
    "attention.head_count": 0,
    "attention__key_length": None,
    "feed_forward_length": 0,
}
SSM_OF_DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
}
FALCON = {"feed_forward_length": 256}
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
    "gemma3n_text": (
        "gemma3n",
        {
            **TIED,
            **GEMMA3N,
            "laurel_rank": 64,
            "vocab_size_per_layer_input": 512,
            "intermediate_size": [96, 64, 96, 96, 128],
        },
        {
            "feed_forward_length": [96, 64, 96, 96, 128],
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, False, True, False, True],
            "attention.shared_kv_layers": 2,
            "altup.active_idx": 1,
            "altup.num_inputs": 3,
            "embedding_length_per_layer_input": 16,
            "activation_sparsity_scale": [0.5244005, 0.5244005, *[float("-inf")] * 3],
            "final_logit_softcapping": 5.0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 100.0,
        },
    ),
    "gemma4_text": (
        "gemma4",
        {**TIED, **GEMMA4},
        {
            "feed_forward_length": [96] * 4 + [192] * 2,
            "attention.key_length": 32,
            "attention.key_length_swa": 16,
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, True, False] * 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 16,
            "final_logit_softcapping": 5.0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gemma4_text with keys as values": (
        "gemma4",
        {**TIED, **GEMMA4_LARGE, "use_bidirectional_attention": "vision"},
        {
            "attention.key_length": 32,
            "attention.key_length_swa": 16,
            "attention.head_count_kv": [2, 2, 1],
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, True, False],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
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
    "phimoe": (
        "phimoe",
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "num_local_experts": 4,
            "sliding_window": 24,
            "rope_theta": 1e4,
        },
        {"attention.sliding_window": 24},
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
    "seed_oss": ("seed_oss", {"head_dim": 16}, {}),
    "exaone4": (
        "exaone4",
        {"sliding_window": 24, "layer_types": WINDOWS},
        {
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "starcoder2": ("starcoder2", {}, {}),
    "stablelm": ("stablelm", {"qk_layernorm": True}, {"rope.dimension_count": 4}),
    "stablelm parallel": (
        "stablelm",
        {"use_parallel_residual": True, "use_qkv_bias": True},
        {"rope.dimension_count": 4},
    ),
    "falcon": ("falcon", TIED, FALCON | {"attention.head_count_kv": 1}),
    "falcon 40b": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, FALCON),
    "falcon 11b": (
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        FALCON,
    ),
    "bloom": ("bloom", TIED, FALCON | {"attention.head_count_kv": 4}),
    "mpt": (
        "mpt",
        {**TIED, "max_seq_len": 4096, "attn_config": {"clip_qkv": 1.5, "alibi_bias_max": 16}},
        FALCON | {"attention.clamp_kqv": 1.5, "attention.max_alibi_bias": 16.0},
    ),
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
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32, **TIED},
        {
            "shortconv.l_cache": 3,
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": 64,
        },
    ),
    "lfm2_moe": (
        "lfm2moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            **TIED,
        },
        {
            "shortconv.l_cache": 3,
            "attention.head_count_kv": [0, 2, 0],
            "leading_dense_block_count": 1,
        },
    ),
    "granitemoehybrid": (
        "granitehybrid",
        {**HYBRID, "num_local_experts": 0, "shared_intermediate_size": 80},
        {
            **SSM,
            "attention.head_count_kv": [0, 2, 0],
            "expert_count": None,
            "expert_used_count": None,
            "expert_shared_feed_forward_length": 80,
            "rope.scaling.finetuned": False,
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 24},
        {
            **SSM,
            "attention.head_count": 0,
            "attention__key_length": None,
            "feed_forward_length": 0,
        },
    ),
    "mamba": ("mamba", FIRST_MAMBA, {**SSM_OF_FIRST, "ssm.dt_b_c_rms": False}),
    "falcon_mamba": ("mamba", FIRST_MAMBA, {**SSM_OF_FIRST, "ssm.dt_b_c_rms": True}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_d_state": 24,
            "mamba_dt_rank": 4,
        },
        {
            **SSM,
            "ssm.group_count": None,
            "attention.head_count_kv": [0, 2, 0],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 24,
        },
        {
            **SSM,
            "attention.head_count_kv": [0, 0, 2],
            "feed_forward_length": [0, 96, 0],
            "expert_count": None,
            "expert_used_count": None,
            "expert_feed_forward_length": None,
        },
    ),
    "nemotron_h 3": (
        "nemotron_h_moe",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "n_group": 2,
            "topk_group": 2,
        },
        {
            **SSM,
            "attention.head_count_kv": [0, 0, 2],
            "feed_forward_length": [0, 48, 0],
            "expert_shared_feed_forward_length": 80,
            "expert_weights_norm": False,
            "expert_weights_scale": 2.5,
            "expert_group_count": 2,
            "expert_group_used_count": 2,
            "moe_latent_size": 32,
        },
    ),
    "qwen3_5_text": ("qwen35", {**DELTA, **TIED}, SSM_OF_DELTA),
    "qwen3_5_moe_text": (
        "qwen35moe",
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        {**SSM_OF_DELTA, "feed_forward_length": None},
    ),
    "falcon_h1": (
        "falcon-h1",
        {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        SSM,
    ),
}
_PERMUTED = ("granite", "smollm3", "granitehybrid")
"""Whose rows of q and k the converter puts into the order of pairs, as Llama's."""


Kind = gguf.GGMLQuantizationType


def write(
    folder: Path, path: Path, architecture: str, extra: dict[str, Any], kind: Kind = Kind.F32
) -> None:
    """With metadata of the architecture in `extra` beside those that all have. `kind`: of matrices
    of whole blocks; the others are in float32.
    """
    config = AutoConfig.from_pretrained(folder)
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config), **extra}.items():
        add_metadata(writer, f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_eos_token_id(2)
    tensors = by_kind_of_head(load_file(folder / "model.safetensors"), config)
    for each in ("altup_projections", "altup_unembed_projections"):
        names_of_streams = sorted(name for name in tensors if f"model.{each}." in name)
        if parts := [tensors.pop(name) for name in names_of_streams]:
            tensors[f"model.{each}.weight"] = torch.stack(parts)
    for merged, parts in experts(tensors).items():
        writer.add_tensor(merged, np.stack([tensors.pop(part).numpy() for part in parts]))
    for name, tensor in (each for one in tensors.items() for each in converted(*one, architecture)):
        array = tensor.float().numpy()
        is_less_one = architecture.startswith(("gemma", "qwen3next", "qwen35"))
        is_less_one = is_less_one and architecture not in ("gemma3n", "gemma4")
        if is_less_one and name.endswith("norm.weight") and "linear_attn.norm" not in name:
            array = array + np.float32(1.0)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if architecture in _PERMUTED and heads is not None:
            pairs = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = pairs.reshape(array.shape)
        if architecture == "bloom":
            name = name.removeprefix("transformer.")
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        ours = ours or (name if name.startswith("blk.") else None)
        assert ours is not None, name
        array = np.ascontiguousarray(array)
        if kind != Kind.F32 and array.ndim > 1 and array.shape[-1] % 32 == 0:
            writer.add_tensor(ours, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(ours, array)
    if architecture == "gemma4":
        divisors = [1.0] * 4 + [1e30] * 12
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in ("long", "short"):
        if factors := rope.get(f"{kind}_factor"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
    finish(writer)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_same_model_as_its_folder(tmp_path: Path, name: str) -> None:
    architecture, changes, extra = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", name.partition(" ")[0], **changes)
    path = tmp_path / "model.gguf"
    write(folder, path, architecture, extra)
    file, whole = (
        load_model(str(each), torch.float32, torch.device("cpu"), False) for each in (path, folder)
    )
    ours, theirs = loaded_weights(file), loaded_weights(whole)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[each], tensor) for each, tensor in theirs.items())
    for each in file.model.rotaries.buffers():
        assert any(torch.equal(each, other) for other in whole.buffers())
    layouts = [model.kv_layouts(torch.float32) for model in (file, whole)]
    assert layouts[0] == layouts[1]
    said, wanted = asdict(file.config), asdict(whole.config)
    others = {"architecture", "dtype", "rope_scaling", "rope_local_base_freq"}
    # What the size between gate and down projection follows from.
    others |= {"block_multiple_of", "block_auto_adjust_ff_dim"}
    for each in said.keys() - others:
        assert said[each] == pytest.approx(wanted[each]), each


def test_a_file_of_gpt_oss_does_not_round_the_range_that_yarn_scales(tmp_path: Path) -> None:
    """No metadata say so: all models of this kind have `truncate: false`."""
    folder = make_tiny_model(tmp_path / "model", "gpt_oss", head_dim=16, num_local_experts=2)
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    for key, value in {**metadata_of(config), **yarn}.items():
        add_metadata(writer, f"gpt-oss.{key.replace('__', '.')}", value)
    for name in ("token_embd.weight", "a", "b"):
        writer.add_tensor(name, np.zeros((512, 64), np.float32))
    finish(writer)
    read = ModelConfig.from_gguf(open_gguf(tmp_path / "model.gguf"), eos_token_ids=[2])
    assert read.rope_scaling["truncate"] is False


def test_a_file_of_qwen3_next_says_what_its_folder_says(tmp_path: Path) -> None:
    """Its rows stand in another order than a checkpoint's."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {**DELTA, **experts, "shared_expert_intermediate_size": 48}
    folder = make_tiny_model(tmp_path / "model", "qwen3_next", **sizes)
    extra = SSM_OF_DELTA
    path = tmp_path / "model.gguf"
    write(folder, path, "qwen3next", extra)
    assert_alike(answer(load(path)), answer(load(folder)))


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_quantised_stays_so_in_another_order(dim: int) -> None:
    """Of two rows or blocks of 32 columns at a time, also a rank's part of it."""
    stored = torch.randint(0, 256, (8, 4 * 18), dtype=torch.uint8)
    numbers = torch.randn(8, 128)
    tensor = StoredTensor(
        Path("x"), "w", (8, 128), lambda target: target.copy_(numbers), kind="Q4_0",
        blocks=lambda: stored,
    )  # fmt: skip
    moved = reordered(tensor, dim, [2, 0, 3, 1], (2, 32)[dim])
    units = torch.tensor([2, 0, 3, 1])
    wanted = stored.unflatten(dim, (4, -1)).index_select(dim, units).flatten(dim, dim + 1)
    assert moved.blocks is not None and torch.equal(moved.blocks(), wanted)
    values = numbers.unflatten(dim, (4, -1)).index_select(dim, units).flatten(dim, dim + 1)
    assert torch.equal(moved.read(), values)
    part = (
        moved.part((slice(0, 8), slice(64, 128)))
        if dim
        else moved.part((slice(2, 6), slice(0, 128)))
    )
    assert part.blocks is not None
    assert torch.equal(part.blocks(), wanted[:, 36:] if dim else wanted[2:6])
    assert torch.equal(part.read(), values[:, 64:] if dim else values[2:6])


def test_columns_within_a_block_are_moved_as_numbers() -> None:
    tensor = StoredTensor(
        Path("x"), "w", (2, 256), lambda target: target.fill_(1.0), kind="Q4_K",
        blocks=lambda: torch.zeros(2, 144, dtype=torch.uint8),
    )  # fmt: skip
    moved = reordered(tensor, 1, [1, 0], 128)
    assert moved.blocks is None and moved.kind is None
    assert reordered(tensor, 1, [0, 1], 128).kind == "Q4_K"
