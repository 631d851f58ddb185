"""One comparison of the GPU suite's correctness parts, and how a part runs many."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from .gpu_engines import Scale

# No check starts with less time than this left, because an unfinished part reports nothing.
_LONGEST_CHECK_SECONDS = 25.0


class Check(NamedTuple):
    """One comparison. `detail` has the difference, or the error."""

    name: str
    ok: bool
    detail: str


def run(scale: Scale, checks: Iterable[Check]) -> dict[str, Any]:
    """Make the checks, until there is no time for another."""
    done: list[Check] = []
    for check in checks:
        done.append(check)
        if time.monotonic() > scale.until - _LONGEST_CHECK_SECONDS:
            done.append(Check("the remaining checks", False, "no time was left"))
            break
    return {"ok": all(check.ok for check in done), "checks": [check._asdict() for check in done]}


def checked(name: str, measure: Any, allowed: float = 1.0) -> Check:
    """Return the check of an error that `measure` returns, at most `allowed`."""
    try:
        error = measure()
    except Exception as error_raised:
        return Check(
            name, False, " ".join(f"{type(error_raised).__name__}: {error_raised}".split())[:300]
        )
    return Check(name, bool(error <= allowed), f"{error:.3g} of {allowed:.3g} allowed")
