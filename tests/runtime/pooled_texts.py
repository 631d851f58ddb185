"""Token ids of texts of several lengths, and what models make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from piecework.runtime.pooling.config import PoolingConfig
from piecework.runtime.pooling.model import PoolingModel, PoolInput

LENGTHS = (7, 3, 12, 7, 1, 40)


def inputs(vocab: int = 64, pairs: bool = False) -> list[PoolInput]:
    rng = np.random.default_rng(0)
    # No padding token: RoBERTa counts positions without it.
    return [
        PoolInput(rng.integers(4, vocab, length).astype(np.int32), length // 2 if pairs else length)
        for length in LENGTHS
    ]


def states(folder: Path, given: list[PoolInput]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(torch.from_numpy(each.token_ids)[None].long()).last_hidden_state[0]
            for each in given
        ]


def run(folder: Path, given: list[PoolInput], **settings: object) -> np.ndarray:
    config = PoolingConfig(model_path=str(folder), num_threads=1, **settings)  # type: ignore[arg-type]
    return PoolingModel(config).run(given)
