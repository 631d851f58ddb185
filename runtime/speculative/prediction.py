"""Proposes the text that a client expects: OpenAI's parameter `prediction`."""

from __future__ import annotations

from array import array

import numpy as np

from ..core.request import Request
from .method import Guess
from .ngrams import LENGTH, LONGEST, Ngrams


class Prediction:
    """Follows the predicted text of a request."""

    name = "prediction"

    def begin(self, request: Request) -> PredictionLookup | None:
        if not request.prediction:
            return None
        lookup = PredictionLookup(request.prediction)
        lookup.append(request.output_tokens.tolist())
        return lookup

    def end(self, request: Request) -> None:
        pass


class PredictionLookup:
    """The place in a predicted text that an answer has reached.

    A token that differs is taken for a replacement of one token, until the last tokens of the
    answer occur elsewhere in the prediction: after text that was inserted or left out.
    """

    def __init__(self, prediction: list[int]) -> None:
        self._prediction = Ngrams(np.array(prediction, np.int64))
        self._recent = array("i")
        self._place = 0
        self._length = LONGEST  # Number of tokens that agreed before the place.

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self._recent = self._recent[1 - LONGEST :]
            self._recent.append(token)
            expected = self._prediction.tokens[self._place : self._place + 1]
            agrees = bool(expected) and expected[0] == token
            self._place += 1
            self._length = self._length + 1 if agrees else 0
            if self._length < LENGTH:
                place, length = self._prediction.find(self._recent)
                if length:
                    self._place, self._length = place, length

    def guess(self, most: int) -> Guess | None:
        tokens = self._prediction.tokens[self._place : self._place + most].tolist()
        return Guess(tokens, f"{min(self._length, 64).bit_length()}") if tokens else None
