"""GGUF files: every storage format gives the values it stands for, under the right names and in the right order of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_models import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from piecework.runtime.layers.rotary import inverse_frequencies
from piecework.runtime.model_config import ModelConfig
from piecework.runtime.weights.gguf_reader import open_gguf
from piecework.runtime.weights.loader import checkpoint_targets, load_model

TYPES = gguf.GGMLQuantizationType
SETTINGS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def load(path: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(str(path), torch.float32, torch.device("cpu"), False)
    return checkpoint_targets(model)


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1])
def test_a_format_gives_its_values(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", **SETTINGS)
    held = write_gguf(folder, tmp_path / "model.gguf", "llama", kind)
    loaded = load(tmp_path / "model.gguf")
    assert set(loaded) == set(held)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize(("architecture", "biases"), [("qwen2", {}), ("qwen3", {}), ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_an_architecture_gives_the_same_logits_as_its_folder(tmp_path: Path, architecture: str, biases: dict[str, bool]) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture, **biases)
    write_gguf(folder, tmp_path / "model.gguf", architecture, TYPES.F32)
    ours, theirs = load(tmp_path / "model.gguf"), dict_of(folder)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    wanted, read = ModelConfig.from_pretrained(folder), ModelConfig.from_gguf(open_gguf(tmp_path / "model.gguf"), eos_token_ids=[2])
    for name in ("num_heads", "num_kv_heads", "head_dim", "rope_theta", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"):
        assert getattr(read, name) == getattr(wanted, name), name


def dict_of(folder: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(str(folder), torch.float32, torch.device("cpu"), False)
    return checkpoint_targets(model)


@pytest.mark.parametrize("kind", [TYPES.Q2_K, TYPES.Q3_K, TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K, TYPES.IQ4_NL])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000))
def test_k_quants_are_read(tmp_path_factory: pytest.TempPathFactory, kind: gguf.GGMLQuantizationType, seed: int) -> None:
    """There is no quantiser for them in Python, so random blocks stand in: whatever they hold must come out."""
    path = tmp_path_factory.mktemp("k") / "model.gguf"
    blocks = np.random.default_rng(seed).integers(
        0, 256, (512, gguf.GGML_QUANT_SIZES[kind][1] * 256 // gguf.GGML_QUANT_SIZES[kind][0]), np.uint8
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from piecework.runtime.weights.gguf import read_tensors

    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=512, hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=256, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=1e4,
    )  # fmt: skip
    ((name, tensor),) = read_tensors(open_gguf(path), config, torch.float32)
    assert name == "model.embed_tokens.weight"
    assert tensor.shape == (512, 256)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(tensor.nan_to_num(), expected.nan_to_num())


def test_stored_rope_factors_are_llama_3s_scaling() -> None:
    """The converter works Llama 3.1's scaling out into a factor a frequency; both ways must turn alike."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,
        intermediate_size=8, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=5e5,
    )  # fmt: skip
    plain = inverse_frequencies(config)
    scaled = inverse_frequencies(replace(config, rope_type="llama3", rope_scaling=rope))
    factors = (plain / scaled).tolist()
    divided = inverse_frequencies(replace(config, rope_type="divided", rope_scaling={"factors": factors}))
    assert max(factors) == pytest.approx(8.0) and min(factors) == pytest.approx(1.0)
    assert torch.allclose(divided, scaled)


@pytest.mark.parametrize("keep", [0, 10, 200, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_one_clear_error(tmp_path: Path, keep: float) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", **SETTINGS)
    write_gguf(folder, tmp_path / "model.gguf", "llama", TYPES.Q8_0)
    data = (tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        load(cut)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="mamba is not supported; supported: LlamaForCausalLM"):
        load(tmp_path / "m.gguf")
