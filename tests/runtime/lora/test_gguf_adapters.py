"""Adapters as llama.cpp converts them are those that were converted."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.runtime.loader.loader import load_model
from piecework.runtime.lora.adapter import AdapterFault
from piecework.runtime.lora.reading import read_adapter
from piecework.runtime.lora.targets import Targets

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": 4, "attn_k": 2}  # Llama's, whose rows the converter reorders.


def convert(adapter: Path, path: Path, *, is_llama: bool, kind: str = "lora") -> Path:
    """Do what convert_lora_to_gguf.py does."""
    writer = gguf.GGUFWriter(path, "llama" if is_llama else "qwen3")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        _, _, _, _, layer, *own, half, _ = name.split(".")
        stem, values = NAMES[".".join(own)], tensor.numpy()
        if half == "lora_B" and is_llama and stem in HEADS:
            shape = HEADS[stem], 2, len(values) // HEADS[stem] // 2, values.shape[1]
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{stem}.weight.lora_{half[-1].lower()}", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_converted_adapter_changes_the_same_numbers(architecture: str, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", architecture, num_hidden_layers=2)
    targets = Targets(load_model(str(base), torch.float32, torch.device("cpu"), False))
    adapter = make_adapter(tmp_path / "adapter", base, rank=4, alpha=8)
    converted = convert(adapter, tmp_path / "a.gguf", is_llama=architecture == "llama")
    wanted, found = (
        read_adapter(str(path), targets, torch.float32, 16).updates for path in (adapter, converted)
    )
    assert wanted.keys() == found.keys()
    for place, update in wanted.items():
        assert torch.equal(update.a, found[place].a) and torch.equal(update.b, found[place].b)
        assert update.scale == found[place].scale


def test_other_files_are_refused(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", num_hidden_layers=2)
    targets = Targets(load_model(str(base), torch.float32, torch.device("cpu"), False))
    adapter = make_adapter(tmp_path / "adapter", base)
    other = convert(adapter, tmp_path / "other.gguf", is_llama=True, kind="control_vector")
    (tmp_path / "cut.gguf").write_bytes(other.read_bytes()[:4000])
    for path, reason in ((other, "is no LoRA adapter"), (tmp_path / "cut.gguf", "cut.gguf")):
        with pytest.raises(AdapterFault, match=reason):
            read_adapter(str(path), targets, torch.float32, 16)
