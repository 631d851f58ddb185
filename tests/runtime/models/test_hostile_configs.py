"""A config.json that somebody has tampered with: one line of `ValueError`, or a model, for every
architecture and member.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import CONFIG_MAPPING, AutoConfig

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.model_registry import FALLBACK, ModelCode, find_model, find_models
from piecework.runtime.engine.build import build_engine
from piecework.runtime.layers import moe
from piecework.runtime.layers.rotary import scaled_frequencies
from piecework.runtime.loader.loader import empty_model, load_model
from piecework.runtime.models.llama4 import Llama4Config
from tests.runtime.models.sizes import YARN
from tests.runtime.models.variants import OTHERS

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
VALUES: tuple[Any, ...] = (0, -1, 1.5, None, "x", [], [0], {}, {"a": {}}, True, 1e300, [None] * 3)
HUGE: tuple[Any, ...] = (10**400, 2**62, float("inf"), float("nan"))
"""Numbers that JSON has as Python reads it, and tensors have not."""
META = torch.device("meta")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_no_member_is_the_loaders_end(name: str, tmp_path: Path) -> None:
    model_type, overrides = OTHERS[name]
    settings = SIZES | {key: value for key, value in overrides.items() if key != "text_config"}
    if text := overrides.get("text_config"):
        settings = overrides | {"text_config": SIZES | text}
    if isinstance(getattr(CONFIG_MAPPING[model_type], "head_dim", None), property):
        del settings["head_dim"]
    content = AutoConfig.for_model(model_type, **settings).to_dict()
    names = next(each for each in find_models() if each.model_type in (model_type,))
    content |= {"architectures": [names.architecture], "model_type": names.model_type}
    assert find_model(architecture=names.architecture) == names
    told = content.get("text_config", content)
    file = tmp_path / "config.json"
    made = 0
    for member in [*told, "rope_scaling", "sliding_window_pattern", "partial_rotary_factor"]:
        for value in VALUES + HUGE:
            changed = told | {member: value}
            whole = content | {"text_config": changed} if told is not content else changed
            file.write_text(json.dumps(whole))
            try:
                config = ModelConfig.from_pretrained(tmp_path)
                empty_model(config, torch.float32, META).kv_layouts(torch.float32)
                made += 1
            except ValueError as error:
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{member} = {value!r}: {error!r}") from error
    assert made


def folder_of(path: Path, name: str, **changes: Any) -> Path:
    """A config.json of a variant, with other members."""
    model_type, overrides = OTHERS[name]
    content = AutoConfig.for_model(model_type, **(SIZES | overrides)).to_dict()
    architecture = next(
        each.architecture for each in find_models() if each.model_type == model_type
    )
    (path / "config.json").write_text(
        json.dumps(content | {"architectures": [architecture]} | changes)
    )
    return path


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granitemoe", "glm4-moe", "llama4"]
)
def test_experts_with_another_activation_are_refused(name: str, tmp_path: Path) -> None:
    """By our own code: transformers' takes them."""
    folder = folder_of(tmp_path, name, hidden_act="gelu")
    with pytest.raises(ValueError, match="activation 'gelu' of experts is not supported; choose"):
        ModelConfig.from_pretrained(folder)
    if name == "mixtral":
        config = ModelConfig.from_pretrained(folder, code=ModelCode("auto"))
        assert config.architecture == FALLBACK


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("granitemoe", "num_local_experts"),
        ("granite4-moe", "num_local_experts"),
        ("llama4", "num_local_experts"),
        ("minimax", "num_local_experts"),
        ("kimi-linear", "num_experts"),
        ("lfm2-moe", "num_experts"),
        ("qwen3-next", "num_experts"),
        ("glm4-moe", "n_routed_experts"),
        ("deepseek-v3", "n_routed_experts"),
        ("longcat-flash", "n_routed_experts"),
    ],
)
def test_experts_are_counted_before_lists_are_made_of_them(
    name: str, member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_pretrained(folder_of(tmp_path, name, **{member: 2**29}))
    monkeypatch.setattr(moe, "ExpertLinear", None)
    with pytest.raises(ValueError, match="experts, but at most"):
        empty_model(config, torch.float32, META)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"zero_expert_type": "copy"},
            "zero_expert_type 'copy' is not supported, identity is; cho",
        ),
        ({"zero_expert_num": -1}, "zero_expert_num must be 0 to .*; download the model again"),
        ({"q_lora_rank": None}, "it has no q_lora_rank; download the model again"),
    ],
)
def test_experts_without_weights_are_checked(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "longcat-flash", **changes)
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_pretrained(folder)


GROWS = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("lfm2", {"block_ff_dim": 1e29}),
        ("kimi-linear", {"linear_attn_config": {"head_dim": [24]}}),
        ("kimi-linear", {"linear_attn_config": {"num_heads": 10**400}}),
        (
            "kimi-linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": {}},
                "linear_head_dim": 0,
            },
        ),
        ("kimi-linear", {"mlp_layer_types": [[], [], []]}),
        ("olmo-hybrid", {"linear_num_key_heads": 0}),
        ("olmo-hybrid", {"linear_value_head_dim": -1}),
        ("minimax", {"layer_types": None, "attn_type_list": [0, [], 2]}),
        ("minimax", {"full_attn_alpha_factor": float("nan")}),
        ("minimax-m2", {"rotary_dim": "8"}),
        ("minimax-m2", {"rotary_dim": 18}),
        ("llama4", {"layer_types": ["chunked_attention", "sliding_attention", "full_attention"]}),
        ("lfm2", {"block_ffn_dim_multiplier": 1e25}),
        ("falcon-h1", {"mlp_multipliers": [10**400, 1.0]}),
        ("falcon-h1", {"ssm_multipliers": [float("nan")] * 5}),
        ("granite4", {"time_step_limit": [0.0, 10**400]}),
        ("ministral3", {"rope_parameters": {**GROWS, ORIGINAL: "x"}}),
        ("ministral3", {"rope_parameters": {**GROWS, ORIGINAL: -1}}),
        ("deepseek-v3", {"rope_scaling": {**YARN, "mscale_all_dim": "x"}}),
        ("olmo2", {"rope_scaling": {**YARN, "beta_fast": "x"}}),
        ("olmo2", {"rope_scaling": {**YARN, "attention_factor": []}}),
        ("olmo2", {"rope_scaling": {**YARN, "rope_theta": 1.0}}),
    ],
)
def test_numbers_within_members_end_nothing_either(
    name: str, members: dict[str, Any], tmp_path: Path
) -> None:
    folder_of(tmp_path, name, **members)
    with pytest.raises(ValueError, match="download the model again"):
        config = ModelConfig.from_pretrained(tmp_path)
        empty_model(config, torch.float32, META)
        scaled_frequencies(config)


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_scaled_frequencies_of_layers_with_a_window_are_refused(name: str, tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    }
    folder_of(tmp_path, name, rope_parameters=rope, rope_scaling=None)
    with pytest.raises(ValueError, match="'linear' of layers with a window is not supported"):
        ModelConfig.from_pretrained(tmp_path)


def test_llama_4s_tuning_may_be_told_as_a_number(tmp_path: Path) -> None:
    """As in folders from before transformers made it true or false."""
    folder_of(tmp_path, "llama4", attn_temperature_tuning=4)
    assert isinstance(config := ModelConfig.from_pretrained(tmp_path), Llama4Config)
    assert config.attn_temperature_tuning


def test_sizes_that_no_machine_has_are_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, "gemma", num_attention_heads=2**30, num_key_value_heads=1, head_dim=2**30)
    config = ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="too little memory for the weights"):
        empty_model(config, torch.float32, META)


def test_states_of_a_terabyte_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """Weights of a hundred megabytes have such."""
    folder_of(
        tmp_path,
        "granite4",
        hidden_size=8,
        intermediate_size=8,
        shared_intermediate_size=8,
        head_dim=4,
        layer_types=["full_attention", "full_attention", "linear_attention"],
        mamba_expand=2**16,
        mamba_n_heads=1,
        mamba_d_head=2**19,
        mamba_n_groups=1,
        mamba_d_state=2**19,
    )
    with pytest.raises(ValueError, match="too little memory for recurrent states"):
        build_engine(EngineConfig(model_path=str(tmp_path), load_format="dummy", num_threads=1))


def test_tables_of_positions_are_made_behind_the_weights(tmp_path: Path) -> None:
    """A long context in a config.json that fits no weights costs no memory."""
    path = make_tiny_model(tmp_path)
    content = json.loads((path / "config.json").read_text())
    changed = content | {"max_position_embeddings": 2**24, "hidden_size": 128}
    (path / "config.json").write_text(json.dumps(changed))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="has shape"):
        load_model(str(path), torch.float32, torch.device("cpu"), False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19


def test_a_long_table_ends_with_the_context_that_is_served(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, max_position_embeddings=2**23)
    model = load_model(str(path), torch.float32, torch.device("cpu"), False, context_length=1000)
    assert len(model.model.rotaries[0].cos) == 1000
