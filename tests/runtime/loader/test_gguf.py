"""GGUF files: every storage format gives the values it stands for, under the right names and in the
right order of rows.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from examples import examples
from gguf_blocks import random_blocks
from gguf_models import Kind, finish, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_weights import loaded_weights
from tiny_models import make_tiny_model

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.files.gguf_reader import open_gguf
from piecework.runtime.layers.rotary import scaled_frequencies
from piecework.runtime.loader.gguf import list_tensors
from piecework.runtime.loader.loader import load_model

SETTINGS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=512, hidden_size=256, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=64, intermediate_size=256, norm_eps=1e-5,
    max_position_embeddings=64, rope_theta=1e4,
)  # fmt: skip


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model(str(path), dtype, torch.device("cpu"), False)
    return loaded_weights(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", **SETTINGS)


@pytest.mark.parametrize(
    "kind",
    [
        Kind.F32,
        Kind.F16,
        Kind.BF16,
        Kind.Q8_0,
        Kind.Q4_0,
        Kind.Q4_1,
        Kind.Q5_0,
        Kind.Q5_1,
        Kind.TQ2_0,
    ],
)
def test_a_format_gives_its_values(folder: Path, tmp_path: Path, kind: Kind) -> None:
    held = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load(tmp_path / "model.gguf", dtype)
        assert set(loaded) == set(held)
        assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in held.items())


K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.mark.parametrize("kind", K_QUANTS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 1100))
def test_k_quants_are_read(
    tmp_path_factory: pytest.TempPathFactory, kind: Kind, seed: int, rows: int
) -> None:
    """There is no quantiser for them in Python, so random blocks stand in: whatever they hold must
    come out.

    A row is one block, so that 1,024 rows are what is dequantised at once.
    """
    path = tmp_path_factory.mktemp("k") / "model.gguf"
    blocks, expected = random_blocks(kind.name, rows, 256, seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    finish(writer)
    (tensor,) = list_tensors(open_gguf(path), CONFIG)
    assert (tensor.file, tensor.name, tensor.shape) == (
        path,
        "model.embed_tokens.weight",
        (rows, 256),
    )
    values = torch.empty(tensor.shape)
    tensor.copy_to(values)
    assert torch.equal(values, torch.from_numpy(expected))


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mixtral", {"num_local_experts": 3}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    ("olmoe", {**EXPERTS, "num_key_value_heads": 4}),
]
GGUF_NAMES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_a_file_is_the_same_model_as_its_folder(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture, **changes)
    name = GGUF_NAMES.get(architecture, architecture)
    write_gguf(folder, tmp_path / "model.gguf", name, Kind.F32)
    ours, theirs = load(tmp_path / "model.gguf"), load(folder)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    read, wanted = (
        ModelConfig.from_gguf(open_gguf(tmp_path / "model.gguf"), eos_token_ids=[2]),
        ModelConfig.from_pretrained(folder),
    )
    for name in ModelConfig.__dataclass_fields__.keys() - {"dtype", "norm_eps"}:
        assert getattr(read, name) == getattr(wanted, name), name
    assert read.norm_eps == pytest.approx(wanted.norm_eps)


def test_stored_rope_factors_are_llama_3s_scaling(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = {"rope_type": "llama3", "rope_theta": 1e4, **scaling}
    scaled = ModelConfig.from_pretrained(
        make_tiny_model(tmp_path / "model", "llama", rope_parameters=rope)
    )
    frequencies, _ = scaled_frequencies(scaled)
    plain, _ = scaled_frequencies(replace(scaled, rope_type="default"))
    factors = (plain / frequencies).tolist()
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", "llama", Kind.F32, rope_factors=factors)
    config = load_model(
        str(tmp_path / "model.gguf"), torch.float32, torch.device("cpu"), False
    ).config
    torch.testing.assert_close(scaled_frequencies(config)[0], frequencies)


def test_linear_rope_scaling_is_read(folder: Path, tmp_path: Path) -> None:
    write_gguf(
        folder,
        tmp_path / "model.gguf",
        "llama",
        Kind.F32,
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
    )
    config = ModelConfig.from_gguf(open_gguf(tmp_path / "model.gguf"), eos_token_ids=[])
    assert (config.rope_type, config.rope_scaling) == ("linear", {"factor": 4.0})


def test_the_tokens_that_end_a_text_come_from_the_file(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", "llama", Kind.F16)
    assert load_model(
        str(tmp_path / "model.gguf"), torch.float32, torch.device("cpu"), False
    ).config.eos_token_ids == [2]


@pytest.mark.parametrize("keep", [0, 10, 200, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_one_clear_error(
    folder: Path, tmp_path: Path, keep: float
) -> None:
    write_gguf(folder, tmp_path / "model.gguf", "llama", Kind.Q8_0)
    data = (tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(ValueError, match=r"cut\.gguf") as error:
        load(cut)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    small = make_tiny_model(
        directory / "model", "llama", num_hidden_layers=1, max_position_embeddings=64
    )
    write_gguf(small, directory / "model.gguf", "llama", Kind.Q8_0)
    return directory / "model.gguf"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(deadline=None, max_examples=examples(50, exploring=100))
@given(damage=st.dictionaries(st.integers(0, 2000), st.integers(0, 255), min_size=1, max_size=4))
def test_a_damaged_file_loads_or_is_one_clear_error(whole: Path, damage: dict[int, int]) -> None:
    content = bytearray(whole.read_bytes())
    # Its value stands behind the key and a type of four bytes. Billions of positions would only
    # take long to make.
    context_length = content.index(b"llama.context_length") + len("llama.context_length") + 4
    for place, byte in damage.items():
        if not context_length <= place < context_length + 4:
            content[place] = byte
    damaged = whole.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        load(damaged)
    except ValueError as error:
        assert "\n" not in str(error)
        assert "damaged.gguf" in str(error) or "too little memory" in str(error)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing key": (
        {"context_length": None},
        "llama.context_length must be a whole number, got None; convert",
    ),
    "numbers by layer": (
        {"attention__head_count": [4]},
        r"llama.attention.head_count must be a whole number, got \[4\]",
    ),
    "part of a head": ({"rope__dimension_count": 32}, "rope.dimension_count"),
    "heads of nothing": ({"attention__key_length": 0}, "heads of 0 numbers make no sense"),
    "half a layer": ({"block_count": 1.5}, r"llama.block_count must be a whole number, got 1\.5"),
    "yarn": ({"rope__scaling__type": "yarn"}, "'yarn' needs a positive factor"),
    "linear without a factor": (
        {"rope__scaling__type": "linear"},
        "'linear' needs a positive factor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_one_clear_error(folder: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    write_gguf(folder, tmp_path / "model.gguf", "llama", Kind.F16, **changes)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{message}"):
        load(tmp_path / "model.gguf")


def test_lists_in_lists_without_end_are_one_clear_error(tmp_path: Path) -> None:
    """Twelve bytes a list, each the only one in the list before it."""
    key = b"general.architecture"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "model.gguf"
    path.write_bytes(start + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)
    with pytest.raises(ValueError, match="is not a whole GGUF file"):
        open_gguf(path)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(
        ValueError, match=r"'rwkv7' is not supported; supported: .*LlamaForCausalLM"
    ):
        load(tmp_path / "m.gguf")


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=r"m\.gguf: it has no tensor token_embd\.weight"):
        load(tmp_path / "m.gguf")


def test_a_format_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama", Kind.F32)
    content = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    # Behind the name: number of dimensions (4 bytes), two dimensions (8 each), format.
    place = content.index(name) + len(name) + 4 + 16
    path.write_bytes(content[:place] + Kind.I32.to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(
        ValueError, match=r"blk\.0\.attn_q\.weight is stored as I32, which is not supported"
    ):
        load(path)
