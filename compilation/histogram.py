"""Records the lengths of steps across restarts. auto:K chooses sizes by them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path


class LengthHistogram:
    """Counts steps by their number of tokens, in the file `path`.

    One process writes a file. A damaged file is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.counts: Counter[int] = Counter()
        self._saved = time.monotonic()
        try:
            for length, count in json.loads(path.read_text()).items():
                # Halve the counts of earlier runs, so that current traffic soon weighs more.
                self.counts[int(length)] += (int(count) + 1) // 2
        except (OSError, ValueError, AttributeError, TypeError):
            self.counts.clear()

    def add(self, num_tokens: int) -> None:
        self.counts[num_tokens] += 1

    def save_if_older_than(self, seconds: float) -> None:
        """Save the counts, unless they were saved within the last `seconds`."""
        if time.monotonic() - self._saved > seconds:
            self.save()

    def save(self) -> None:
        """Replace the file atomically. Raise `OSError` if it cannot be written."""
        self._saved = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self.counts))
        os.replace(temporary, self._path)
