"""Progress bars, for people who watch: a file or a pipe gets none."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(
    iterable: Iterable[Any] | None = None, *, shown: bool = True, **settings: Any
) -> Any:
    """A `tqdm` bar on standard error, where that is a terminal and it is to be `shown`."""
    return tqdm(iterable, file=sys.stderr, disable=None if shown else True, **settings)
