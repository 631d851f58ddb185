"""Paths that clients name below a folder that the operator has allowed."""

from __future__ import annotations

import os


def path_below(root: str, path: str, *, is_inside: bool = False) -> str | None:
    """Return the real path of a file or folder below `root`, or None for any other path.

    Links are followed first. `path` may be relative to `root`. If `is_inside`, `root` itself is
    None as well.
    """
    root = os.path.realpath(root)
    try:
        chosen = os.path.realpath(os.path.join(root, path))
        is_below = os.path.commonpath([root, chosen]) == root
    except ValueError:  # A byte of zero.
        return None
    if not is_below or (is_inside and chosen == root) or not os.path.exists(chosen):
        return None
    return chosen
