"""The distinct tokens of a sequence that grows, and how often each is in its output, counted as
they come.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """What penalties ask of a request's tokens, without a look at all of them in every step."""

    def __init__(self, prompt: npt.NDArray[np.int64]) -> None:
        distinct = np.unique(prompt)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._ids = np.concatenate((distinct, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._num_output = 0

    def of(
        self, output: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The distinct tokens of prompt and output [U], and how often `output` has each [U]; it
        begins with what was counted before.
        """
        for token in output[self._num_output :].tolist():
            place = self._place_of(token)
            self._counts[place] += 1.0
        self._num_output = len(output)
        return self._ids[: len(self._place)], self._counts[: len(self._place)]

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        return place
