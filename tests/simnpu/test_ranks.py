"""Two ranks on the simulated NPU, each with its part of a model, say what one on the CPU says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform
from tests.split_models import answer, answer_by, assert_alike, load


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_two_ranks_equal_the_cpu(
    architecture: str, tmp_path: Path, simnpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hardware's kernel takes 16 bits alone; the simulated one takes 32.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    monkeypatch.setattr(AscendAttention, "head_sizes", (16, 32))
    path = make_tiny_model(tmp_path, architecture, tie_word_embeddings=True)
    device = {"platform": NpuPlatform(), "backend": AscendAttention()}
    said = answer_by(2, partial(load, path, device="npu"), **device)
    assert_alike(said, answer(load(path)))
