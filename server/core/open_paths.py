"""Paths that ask for no key, and leave no record."""

from __future__ import annotations

HEALTH_PATHS = frozenset({"/health", "/v1/health", "/ping", "/live", "/ready", "/metrics"})
"""Paths that are answered at once and without the engine, however many connections there are."""
OPEN_PATHS = HEALTH_PATHS | {"/", "/health_generate"}
OPEN_FOLDER = "/v1/images/files/"
"""Its names cannot be guessed, and a browser that is given one has no key."""
PAGE_FOLDER = "/page/"
"""Files of the page at `/`, which hold no data and ask for the key themselves."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith((OPEN_FOLDER, PAGE_FOLDER))
