"""Ollama's `keep_alive`: how long a model stays loaded after its last request."""

from __future__ import annotations

import math
import re

import msgspec

NEVER = 0.0  # The model is not unloaded.
_MOST = 10 * 365 * 86400.0  # Seconds that can be added to a date.
_AT_ONCE = 1e-3  # Seconds for 0, because 0 means never elsewhere.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h)")


def seconds_of(value: bytes) -> float | None:
    """Return the seconds of a JSON value: a number of seconds, or a duration such as "1h30m".

    0 unloads the model at once. A negative value keeps it, which gives `NEVER`. None stands for
    null and for values that are no duration.
    """
    try:
        found = msgspec.json.decode(value, type=float | str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(found, str):
        found = _duration(found)
    if found is None or not math.isfinite(found):
        return None
    return NEVER if found < 0 else min(max(found, _AT_ONCE), _MOST)


def _duration(text: str) -> float | None:
    """Return the seconds of a duration in Go's form, or None."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"[0-9]{1,12}", rest):
        return sign * int(rest)
    if not re.fullmatch(f"(?:{_PART.pattern})+", rest[:200]) or len(rest) > 200:
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(rest))
