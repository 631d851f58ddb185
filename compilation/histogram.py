"""How long steps have been, kept across restarts, so that auto:K can choose sizes for this server's
traffic.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path


class LengthHistogram:
    """Counts steps by their number of tokens, in the file `path`. One process writes a file; a
    damaged one is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.counts: Counter[int] = Counter()
        self._saved = time.monotonic()
        try:
            for length, count in json.loads(path.read_text()).items():
                # Half of what earlier runs saw: traffic changes, and what is seen now should soon
                # weigh more.
                self.counts[int(length)] += (int(count) + 1) // 2
        except (OSError, ValueError, AttributeError, TypeError):
            self.counts.clear()

    def add(self, num_tokens: int) -> None:
        self.counts[num_tokens] += 1

    def save_if_older_than(self, seconds: float) -> None:
        """`save`, unless that was done within the last `seconds`."""
        if time.monotonic() - self._saved > seconds:
            self.save()

    def save(self) -> None:
        """Write it in place of the old one, at once or not at all. Raises `OSError`."""
        self._saved = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(self.counts))
        os.replace(aside, self._path)
