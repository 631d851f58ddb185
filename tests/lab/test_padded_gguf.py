"""`python -m piecework.lab.padded_gguf`: longer rows, the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf_models import Kind, write_gguf
from tiny_models import make_tiny_model

from piecework.lab.padded_gguf import write
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

PROMPT = [(31 + 7 * j * j) % 500 for j in range(40)]


def source(folder: Path, **changes: int) -> Path:
    """Two heads of keys, which three of queries read each."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2} | changes
    model = make_tiny_model(folder / "model", intermediate_size=256, **sizes)
    write_gguf(model, folder / "source.gguf", "llama", Kind.Q8_0)
    return folder / "source.gguf"


def logprobs(path: Path, folder: Path) -> torch.Tensor:
    exact = {"dtype": "float32", "attention_backend": "torch", "tokenizer_path": str(folder)}
    llm = LLM(str(path), max_total_tokens=512, num_threads=1, device="cpu", **exact)
    asked = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=0)
    (done,) = llm.generate([PROMPT], asked)
    return torch.tensor([each.logprob for each in (done.prompt_logprobs or []) if each])


def test_the_model_computes_what_it_did(tmp_path: Path) -> None:
    path = source(tmp_path)
    write(str(path), tmp_path / "padded.gguf")
    found, expected = (
        logprobs(each, tmp_path / "model") for each in (tmp_path / "padded.gguf", path)
    )
    assert (found - expected).abs().max() < 1e-4


def test_each_row_is_of_whole_blocks_that_hold_the_same_share_of_zeros(tmp_path: Path) -> None:
    write(str(source(tmp_path)), tmp_path / "padded.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "padded.gguf").tensors:
        assert tensor.data.shape[-1] % 256 == 0, tensor.name
        if tensor.data.ndim == 2 and not tensor.name.endswith("ffn_down.weight"):
            are_used = torch.from_numpy(tensor.data.copy()).any(0).view(-1, 256).sum(1)
            assert set(are_used.tolist()) == {48}, tensor.name


def test_sizes_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    path = source(tmp_path, hidden_size=256, num_attention_heads=4)
    with pytest.raises(ValueError, match="no zeros can be added to 256 channels, 4 heads"):
        write(str(path), tmp_path / "padded.gguf")
