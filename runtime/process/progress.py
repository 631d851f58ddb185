"""Progress bars on terminals. Files and pipes get none."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(
    iterable: Iterable[Any] | None = None, *, shown: bool = True, **settings: Any
) -> Any:
    """Return a `tqdm` bar on standard error. It is visible on a terminal only, if `shown`."""
    return tqdm(iterable, file=sys.stderr, disable=None if shown else True, **settings)
