"""Output of measurements: distributions, counts of failures, JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .client import RequestFailed

PERCENTILES = (90, 99)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, p90 and p99, interpolated linearly, or None if there are no values."""
    if not values:
        return None
    points = np.percentile(values, [50, *PERCENTILES])
    return {
        "mean": float(np.mean(values)),
        "median": float(points[0]),
        "p90": float(points[1]),
        "p99": float(points[2]),
    }


class Failures:
    """Counts failed requests by reason, and keeps the first example of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, error: RequestFailed) -> None:
        self.counts[error.reason] += 1
        self._examples.setdefault(error.reason, error.detail)

    @property
    def total(self) -> int:
        return self.counts.total()

    def lines(self) -> list[str]:
        """Return a line per reason, the most frequent first."""
        return [
            f"  {count} x {reason}" + (f": {self._examples[reason]}" * bool(self._examples[reason]))
            for reason, count in self.counts.most_common()
        ]

    def as_dict(self) -> dict[str, int]:
        return dict(self.counts.most_common())


class Report:
    """The output: lines to standard output and JSON to a file. With `-`, JSON to standard output
    and lines to standard error.
    """

    def __init__(self, json_target: str | None) -> None:
        """Raise `ValueError` before the measurement if the JSON file cannot be written."""
        self._json_target = json_target
        if json_target not in (None, "-") and not Path(str(json_target)).absolute().parent.is_dir():
            raise ValueError(f"--json {json_target}: there is no such folder")

    def print(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(line, file=sys.stderr if self._json_target == "-" else sys.stdout, flush=True)

    def write(self, result: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the file cannot be written."""
        text = json.dumps(result, indent=2) + "\n"
        if self._json_target == "-":
            sys.stdout.write(text)
        elif self._json_target is not None:
            try:
                Path(self._json_target).write_text(text)
            except OSError as error:
                raise ValueError(f"--json {self._json_target}: {error.strerror}") from None
