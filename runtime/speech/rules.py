"""Which token of a text comes next, by the rules of Whisper's paper (arXiv:2212.04356, 4.5).

Source of the rules: WhisperTimeStampLogitsProcessor of transformers 5.24, whose results a test
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .folder import SpeechFolder

_NEVER = float("-inf")


class Draw(NamedTuple):
    """How a sequence chooses. `generator` is None for the most likely token."""

    written: Sequence[int]
    temperature: float = 0.0
    generator: torch.Generator | None = None


class TokenRules:
    """Chooses tokens from logits."""

    def __init__(self, folder: SpeechFolder) -> None:
        self._end, self._first_timestamp = folder.end, folder.first_timestamp
        self._latest_start = folder.latest_start
        self._suppressed = torch.zeros(folder.sizes.vocab_size)
        self._suppressed[[*folder.suppressed, folder.no_timestamps]] = _NEVER
        self._suppressed_first = folder.suppressed_first

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[int, float]]:
        """Return a token and its log-probability for each row of logits [B, vocab]."""
        logits = logits + self._suppressed
        for row, draw in zip(logits, draws, strict=True):
            self._restrict(row, draw.written)
        begin = self._first_timestamp
        # If all timestamps together are more likely than any other token, a timestamp comes next.
        likely = logits[:, begin:].logsumexp(-1) > logits[:, :begin].amax(-1)
        logits[:, :begin].masked_fill_(likely[:, None], _NEVER)
        tokens = logits.argmax(-1)
        for index, draw in enumerate(draws):
            if draw.generator is not None:
                weights = (logits[index] / draw.temperature).softmax(-1)
                tokens[index] = torch.multinomial(weights, 1, generator=draw.generator)
        chosen = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        return list(zip(tokens.tolist(), chosen.tolist(), strict=True))

    def _restrict(self, row: torch.Tensor, written: Sequence[int]) -> None:
        """Exclude tokens that may not follow. Timestamps come in pairs, except before the end."""
        begin = self._first_timestamp
        if not written:
            row[self._suppressed_first] = _NEVER
            row[:begin] = _NEVER
            if self._latest_start is not None:
                row[begin + self._latest_start + 1 :] = _NEVER
            return
        after_one = written[-1] >= begin
        after_two = after_one and (len(written) < 2 or written[-2] >= begin)
        if after_two:
            row[begin:] = _NEVER
        elif after_one:
            row[: self._end] = _NEVER
        last = next((token for token in reversed(written) if token >= begin), None)
        if last is not None:
            # The end of a segment may be the start of the next one, but no segment is empty.
            row[begin : last if after_one and not after_two else last + 1] = _NEVER
