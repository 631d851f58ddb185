"""Model configs: read as transformers reads them; what our layers cannot compute is refused in one
line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, make_tiny_model
from transformers import AutoConfig

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.loader.loader import empty_model

NUMBERS: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4, "eos_token_id": 7,
}  # fmt: skip


def write(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A folder with a config.json alone; a change to None takes the member out."""
    config_class = CONFIGS[architecture]
    content = (
        config_class(
            **NUMBERS, architectures=[f"{config_class.__name__.removesuffix('Config')}ForCausalLM"]
        ).to_dict()
        | changes
    )
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in content.items() if value is not None})
    )
    return folder


ANY_BOOL = st.booleans()
SCALINGS = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]  # fmt: skip
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "num_key_value_heads": st.sampled_from([2, 6]),
        "head_dim": st.sampled_from([8, 16]),
        "max_position_embeddings": st.sampled_from([128, 256]),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
        "tie_word_embeddings": ANY_BOOL,
        "attention_bias": ANY_BOOL,
        "mlp_bias": ANY_BOOL,
        "use_sliding_window": ANY_BOOL,
        "sliding_window": st.sampled_from([None, 16]),
        "max_window_layers": st.integers(0, 5),
        "layer_types": st.lists(
            st.sampled_from(["full_attention", "sliding_attention"]), min_size=4, max_size=4
        ),
        "rope_theta": st.sampled_from([10000, 5e5]),
        "rope_scaling": st.sampled_from(SCALINGS),
        "torch_dtype": st.sampled_from(["float16", "float32"]),
    },
)


@settings(max_examples=examples(80, exploring=150))
@given(architecture=st.sampled_from([*CONFIGS]), members=MEMBERS)
def test_a_file_means_what_transformers_reads_in_it(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, members: dict[str, Any]
) -> None:
    """Also what it leaves out."""
    config_class = CONFIGS[architecture]
    name = f"{config_class.__name__.removesuffix('Config')}ForCausalLM"
    needed = {key: NUMBERS[key] for key in NUMBERS if key not in ("num_key_value_heads",)}
    needed = {key: value for key, value in needed.items() if not key.startswith(("rms", "max"))}
    if architecture != "llama":
        members.setdefault("num_key_value_heads", 3)
    content = {**needed, "model_type": architecture, "architectures": [name], **members}
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(content))
    ours, theirs = ModelConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    rope = dict(theirs.rope_parameters)
    rope.pop("type", None)
    assert (ours.rope_theta, ours.rope_type) == (rope.pop("rope_theta"), rope.pop("rope_type"))
    assert ours.rope_scaling == rope
    for own, name in (
        ("num_kv_heads", "num_key_value_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ):
        assert getattr(ours, own) == getattr(theirs, name)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // 6)
    assert f"torch.{ours.dtype}" == str(theirs.dtype or "torch.bfloat16")
    window = getattr(theirs, "sliding_window", None) if architecture != "llama" else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert ours.windows == [window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_numbers_are_those_of_the_file(tmp_path: Path, architecture: str) -> None:
    config = ModelConfig.from_pretrained(write(tmp_path, architecture))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (
        320,
        48,
        80,
        4,
    )
    assert (
        config.num_heads,
        config.num_kv_heads,
        config.max_position_embeddings,
        config.norm_eps,
    ) == (6, 2, 128, 1e-4)
    # Qwen3's head size is its own.
    assert config.head_dim == (128 if architecture == "qwen3" else 8)


@pytest.mark.parametrize(
    ("architecture", "asked", "expected"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("qwen2", {"attention_bias": False}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_where_the_architecture_has_them(
    tmp_path: Path, architecture: str, asked: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    folder = write(tmp_path, architecture, **asked)
    model = empty_model(ModelConfig.from_pretrained(folder), torch.float32, torch.device("meta"))
    layer: Any = model.model.layers[0]
    linears = layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.down_proj
    assert tuple(linear.bias is not None for linear in linears) == expected


@pytest.mark.parametrize(
    ("architecture", "member"),
    [
        ("llama", "sliding_window"),
        ("mistral", "attention_bias"),
        ("mistral", "mlp_bias"),
        ("qwen2", "attention_bias"),
        ("qwen3", "mlp_bias"),
    ],
)
@pytest.mark.parametrize("value", [None, "of another kind"])
def test_members_that_the_architecture_does_not_have_mean_nothing(
    tmp_path: Path, architecture: str, member: str, value: object
) -> None:
    without = ModelConfig.from_pretrained(write(tmp_path, architecture, **{member: None}))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, member: value}))
    assert ModelConfig.from_pretrained(tmp_path) == without


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("llama", {"sliding_window": 16}, [None] * 4),
        ("mistral", {"sliding_window": 16}, [16] * 4),
        ("mistral", {"sliding_window": None}, [4096] * 4),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": False, "layer_types": None},
            [None] * 4,
        ),
        (
            "qwen2",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": None,
            },
            [None, 16, 16, 16],
        ),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": None,
            },
            [None, None, None, 16],
        ),
    ],
)
def test_windows_are_per_layer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert ModelConfig.from_pretrained(write(tmp_path, architecture, **changes)).windows == windows


def test_a_mistral_without_a_window_sees_everything(tmp_path: Path) -> None:
    write(tmp_path, "mistral")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "sliding_window": None}))
    assert ModelConfig.from_pretrained(tmp_path).windows == [None] * 4


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5}, (5e5, "default", None)),
        (
            {
                "rope_parameters": None,
                "rope_theta": 5e5,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            (5e5, "linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
            (1e6, "linear", 4.0),
        ),
    ],
)
def test_old_and_new_ways_to_write_rope_scaling(
    tmp_path: Path, changes: dict[str, Any], rope: tuple[float, str, float | None]
) -> None:
    config = ModelConfig.from_pretrained(write(tmp_path, **changes))
    assert (config.rope_theta, config.rope_type, config.rope_scaling.get("factor")) == rope


def test_every_id_that_ends_a_text_counts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == [7, 8, 9]


def test_a_model_need_not_end_texts(tmp_path: Path) -> None:
    assert ModelConfig.from_pretrained(write(tmp_path, eos_token_id=None)).eos_token_ids == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_is_the_one_the_weights_were_saved_in(tmp_path: Path, dtype: str) -> None:
    assert ModelConfig.from_pretrained(make_tiny_model(tmp_path, dtype=dtype)).dtype == dtype


LFM2 = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "relu6"}, "activation 'relu6' is not supported; supported: silu"),
    "quantised": (
        {"quantization_config": {"quant_method": "quip", "bits": 4}},
        "quantised by quip are not supported; supported: .*take such",
    ),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope type": (
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4, "factor": 2.0}},
        "'mrope' is not supported",
    ),
    "rope factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"}},
        "needs a positive factor, got 'two'",
    ),
    "another type": ({"model_type": "qwen3"}, 'goes with "model_type": "llama", got \'qwen3\''),
    "own code": ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "got 'own'"),
    "heads": ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
    "odd head": ({"head_dim": 5}, "an even (rotary dimension|head size)"),
    "layers without end": (
        {"num_hidden_layers": 10**12},
        "num_hidden_layers must be 0 to 10000",
    ),
    "a size of many digits": ({"vocab_size": 10**400}, "vocab_size must be 0 to"),
    "positions without end": ({"max_position_embeddings": 10**9}, "embeddings must be 0 to 16777"),
    "YaRN without end": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e29, "rope_theta": 1e4}},
        "max_position_embeddings must be 0 to",
    ),
    "infinite YaRN": (
        {"rope_parameters": {"rope_type": "yarn", "factor": float("inf"), "rope_theta": 1e4}},
        "needs a positive factor, got inf",
    ),
    "a list for a type": ({"rope_parameters": {"rope_type": ["yarn"]}}, "is not supported"),
    "an epsilon of many digits": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
    "no layers": ({"num_hidden_layers": 0}, "num_layers must be more than 0"),
    "a text for a number": (
        {"vocab_size": "many"},
        "vocab_size must be a whole number, got 'many'",
    ),
    "a member left out": ({"hidden_size": None}, "it has no hidden_size; download the model again"),
    "a number for a flag": ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    "a text for theta": (
        {"rope_parameters": None, "rope_theta": "1e4"},
        "rope_theta must be a number",
    ),
    "rope of each kind": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope scaling .* is not supported",
    ),
    "layer types": (
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "layer_types": ["sliding_attention"],
        },
        "layer_types must have an entry for each",
    ),
    "layers of an unknown kind": (
        {**LFM2, "layer_types": ["conv", "mamba"]},
        "layer_types must be conv or full_attention, got 'mamba'",
    ),
    "a convolution of one token": ({**LFM2, "conv_L_cache": 1}, "conv_L_cache must be 2 to 256"),
    "heads of no size": ({"num_attention_heads": 5, "head_dim": None}, "5 heads cannot share"),
    "architectures": ({"architectures": "LlamaForCausalLM"}, 'no "architectures"'),
    "encoder": (
        {"architectures": ["BertModel"]},
        "'BertModel' is not supported; supported: .*LlamaForCausalLM, .*, Qwen2.*, Qwen3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_one_clear_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = REFUSED[name]
    # Code that comes with a model is never run, nor is anybody asked whether to.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_pretrained(write(tmp_path, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_names_its_file(tmp_path: Path, file: str) -> None:
    write(tmp_path)
    (tmp_path / file).write_bytes(b'{"eos_token_id": \xff')
    with pytest.raises(ValueError, match=rf"{file} is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)


def test_what_is_no_folder_says_what_is_taken(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"missing is not a folder; --model-path takes a Hugging Face folder or a \.gguf file",
    ):
        ModelConfig.from_pretrained(tmp_path / "missing")


def folder_of(folder: Path, model_type: str, architecture: str, **changes: Any) -> Path:
    """A config.json as transformers writes it, without the members that become None."""
    content = AutoConfig.for_model(model_type).to_dict() | {"architectures": [architecture]}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_mamba_has_as_many_channels_and_ranks_as_its_size_asks_for(tmp_path: Path) -> None:
    """Where config.json leaves their numbers out, or says so."""
    changes = {"intermediate_size": None, "time_step_rank": "auto", "hidden_size": 100}
    folder = folder_of(tmp_path, "mamba", "MambaForCausalLM", **changes)
    config: Any = ModelConfig.from_pretrained(folder)
    assert (config.intermediate_size, config.mamba_dt_rank) == (200, 7)


def test_layers_of_jamba_follow_from_periods(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "jamba", "JambaForCausalLM", num_hidden_layers=10)
    config: Any = ModelConfig.from_pretrained(folder)
    attending = [kind == "full_attention" for kind in config.layer_types]
    assert attending == [layer == 4 for layer in range(10)]
    assert config.sparse_layers == [1, 3, 5, 7, 9]
    changes = {"attn_layer_offset": 8}
    folder = folder_of(tmp_path, "jamba", "JambaForCausalLM", **changes)
    with pytest.raises(ValueError, match="attn_layer_offset must be a whole number from 0 to"):
        ModelConfig.from_pretrained(folder)


def test_zamba_uses_its_block_where_a_period_says_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "zamba", "ZambaForCausalLM", layers_block_type=None)
    config: Any = ModelConfig.from_pretrained(folder)
    assert [kind == "hybrid" for kind in config.layer_types] == [
        layer == 2 or (layer > 2 and layer % 6 == 1) for layer in range(76)
    ]
    folder_of(tmp_path, "zamba", "ZambaForCausalLM", n_mamba_heads=5)
    with pytest.raises(ValueError, match="n_mamba_heads is 5, which does not divide 7424 channels"):
        ModelConfig.from_pretrained(folder)


def test_a_model_without_attention_says_nothing_of_heads_and_positions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "mamba2", "Mamba2ForCausalLM")
    config: Any = ModelConfig.from_pretrained(folder)
    assert (config.max_position_embeddings, config.num_heads) == (2**20, 128)
    assert (config.mamba.heads, config.mamba.groups, config.mamba.state) == (128, 8, 128)


def test_letters_of_a_pattern_are_layers_and_their_number(tmp_path: Path) -> None:
    """As in the folders that are published."""
    changes = {"layers_block_type": None, "hybrid_override_pattern": "M-*-"}
    folder = folder_of(tmp_path, "nemotron_h", "NemotronHForCausalLM", **changes)
    config: Any = ModelConfig.from_pretrained(folder)
    assert config.layer_types == ["linear_attention", "mlp", "full_attention", "mlp"]
    assert (config.num_layers, config.mamba.inner) == (4, 128 * 64)
    changes = {"layers_block_type": None, "hybrid_override_pattern": "MEM*E"}
    folder = folder_of(tmp_path, "nemotron_h", "NemotronHForCausalLM", **changes)
    config = ModelConfig.from_pretrained(folder)
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "moe"] == [1, 4]
    for members in ({"mlp_hidden_act": "silu"}, {"moe_latent_size": 64, "mlp_bias": True}):
        folder_of(tmp_path, "nemotron_h", "NemotronHForCausalLM", **changes, **members)
        with pytest.raises(ValueError, match=r"experts with .* are not supported"):
            ModelConfig.from_pretrained(folder)
