"""Printing of untrusted texts, from models, servers, hubs and files, on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without control characters and without characters that change its direction."""
    return _CONTROL.sub("", text)
