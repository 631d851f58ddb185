"""The random mixture of experts that is measured is a model that both servers can read."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from piecework.lab.moe_gguf import Shape, write
from piecework.runtime.layers.moe import SparseMoE
from piecework.runtime.loader.loader import load_model

SHAPE = Shape(layers=2, hidden=64, heads=2, kv_heads=1, head=32, experts=4, chosen=2, width=32)


def test_it_is_a_whole_model_with_the_tokenizer_of_another(tmp_path: Path) -> None:
    source = gguf.GGUFWriter(tmp_path / "source.gguf", "llama")
    source.add_tokenizer_model("gpt2")
    source.add_token_list([f"t{number}" for number in range(96)])
    source.write_header_to_file()
    source.write_kv_data_to_file()
    source.write_tensors_to_file()
    source.close()
    path = tmp_path / "moe.gguf"
    write(str(path), SHAPE, tokenizer=str(tmp_path / "source.gguf"))
    model = load_model(str(path), torch.float32, torch.device("cpu"), False)
    assert model.config.vocab_size == 96
    assert isinstance(model.model.layers[1].mlp, SparseMoE)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert model.model.layers[1].mlp(x).std() > 0
    assert gguf.GGUFReader(path).get_field("tokenizer.ggml.model").contents() == "gpt2"
