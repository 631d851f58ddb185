"""Finds the times of words by dynamic time warping of cross-attention.

Source: _extract_token_timestamps and the pipeline of transformers 5.24, whose results a test
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.whisper.tokenization_whisper import (
    LANGUAGES,
    WhisperTokenizer,
    _combine_tokens_into_words,
)

from ..core.speech_messages import SpeechWord

SECONDS = 0.02  # Time between two positions of the encoder.
Path = np.ndarray[Any, np.dtype[np.int64]]


def token_times(weights: torch.Tensor, width: int) -> list[float]:
    """Return the time in seconds at which each token begins.

    `weights` [heads, tokens, positions] are those of the tokens to the audio. `width` is that of
    the median filter.
    """
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, unbiased=False)
    smooth = _median(torch.nan_to_num((weights - mean) / deviation), width)
    costs = -smooth.mean(dim=0).double().numpy()
    tokens, places = warp(costs)
    begins = np.concatenate([[True], np.diff(tokens) > 0])
    return [float(place) * SECONDS for place in places[begins]]


def _median(weights: torch.Tensor, width: int) -> torch.Tensor:
    """Return the median of `width` neighbours in the last dimension."""
    around = width // 2
    if weights.shape[-1] <= around:
        return weights
    padded = F.pad(weights, (around, around, 0, 0), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., around]


def warp(costs: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[Path, Path]:
    """Return the rows and columns of the cheapest path through [rows, columns].

    The cells of an anti-diagonal do not depend on one another, so each is one vector operation.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    # 0: from the row and the column before, 1: from the row before, 2: from the column before.
    steps = np.full((rows + 1, columns + 1), -1, np.int8)
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where(
            (both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2)
        )
        steps[i, j] = step
        before = np.choose(step, (both, row, column))
        total[i, j] = costs[i - 1, j - 1] + before
    steps[0, :], steps[:, 0] = 2, 1
    i, j = rows, columns
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step_back = steps[i, j]
        i, j = i - (step_back != 2), j - (step_back != 1)
    found = np.array(path[::-1])
    return found[:, 0], found[:, 1]


def join_words(
    tokenizer: WhisperTokenizer, tokens: Sequence[int], times: Sequence[float], language: str
) -> list[SpeechWord]:
    """Return the words of text tokens. `times` has the start of each token and the end of the
    last.
    """
    if not tokens:
        return []
    name = LANGUAGES.get(language, "english")
    words, _, indices = _combine_tokens_into_words(tokenizer, list(tokens), name)
    return [
        SpeechWord(text=word, start=round(times[own[0]], 2), end=round(times[own[-1] + 1], 2))
        for word, own in zip(words, indices, strict=True)
    ]
