"""`python -m piecework.lab.recurrent` and `.recurrent_prompts`: one table each; and the file of
`.recurrent_gguf`.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from piecework.lab import recurrent, recurrent_prompts
from piecework.lab.recurrent_gguf import Shape, write
from piecework.runtime.layers.self_attention import SelfAttention
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.qwen3_5 import SplitDeltaNet


def test_each_model_is_measured_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 3, "prompt": 5, "decodes": 2, "requests": 2, "rounds": 1, "hidden": 64}
    settings = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    assert recurrent.main(["--models", "lfm2", *settings]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["lfm2", "piecework"], ["lfm2", "transformers"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])


def test_kernels_of_prompts_are_measured_beside_plain_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert recurrent_prompts.main(["--tokens", "3", "--rounds", "1", "--processor-time"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        *("gated delta net", "Kimi Delta Attention", "Mamba 2", "short convolution")
    ]
    assert all(float(cell) > 0 for row in rows for cell in row[2:4])


def test_the_random_file_is_a_qwen_that_is_measured_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tmp_path / "source.gguf", tmp_path / "model.gguf"
    vocabulary = gguf.GGUFWriter(source, "llama")
    vocabulary.add_tokenizer_model("gpt2")
    vocabulary.add_token_list([f"t{number}" for number in range(64)])
    vocabulary.write_header_to_file()
    vocabulary.write_kv_data_to_file()
    vocabulary.write_tensors_to_file()
    vocabulary.close()
    shape = Shape(4, 64, 64, heads=2, kv_heads=1, head=32, linear_heads=2, linear_head=32)
    write(str(path), shape, tokenizer=str(source))
    layers = load_model(str(path), torch.float32, torch.device("cpu"), False).model.layers
    assert [isinstance(layer.linear_attn, SplitDeltaNet) for layer in layers[:3]] == [True] * 3
    assert isinstance(layers[3].self_attn, SelfAttention)
    sizes = ("--prompt", "3", "--decodes", "2", "--requests", "1", "--rounds", "1")
    assert recurrent.main(["--file", str(path), "--processor-time", *sizes]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| model | piecework |")
