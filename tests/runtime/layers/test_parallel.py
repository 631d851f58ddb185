"""Ranks that hold parts of a model say what one process says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model

from piecework.runtime.layers.parallel import Shard
from tests.split_models import answer, answer_by, assert_alike, load

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "shared key/value heads": ("llama", 4, {}),
    "tied": ("llama", 2, {"tie_word_embeddings": True}),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", 2, {}),
    "qwen2 on 4, one head shared by all": (
        "qwen2",
        4,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", 2, {}),
    "a window": ("mistral", 2, {"sliding_window": 8}),
    "heads that do not go round": (
        "qwen3",
        2,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "a vocabulary that does not go round": ("llama", 2, {"vocab_size": 500, "eos_token_id": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_say_what_one_process_says(case: str, tmp_path: Path) -> None:
    architecture, size, overrides = CASES[case]
    path = make_tiny_model(tmp_path, architecture, **overrides)
    assert_alike(answer_by(size, partial(load, path)), answer(load(path)))


def test_a_rank_keeps_its_heads_keys_and_values(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    (first, *_) = load(path, Shard(1, 4)).kv_layouts(torch.float32)
    assert (first.num_heads, first.num_kv_heads) == (1, 1)
