"""Paths that need no API key and are not recorded."""

from __future__ import annotations

# Paths that are answered at once and without the engine, also when all connections are in use.
HEALTH_PATHS = frozenset({"/health", "/v1/health", "/ping", "/live", "/ready", "/metrics"})
OPEN_PATHS = HEALTH_PATHS | {"/", "/health_generate"}
# Names in this folder cannot be guessed, and a browser that opens one has no key.
OPEN_FOLDER = "/v1/images/files/"
# Files of the page at `/`, which contain no data. The page asks the user for the key.
PAGE_FOLDER = "/page/"


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith((OPEN_FOLDER, PAGE_FOLDER))
