"""Texts of others on a terminal: of models, servers, hubs and files."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Without the characters by which a text could steer a terminal, or turn what stands there."""
    return _CONTROL.sub("", text)
