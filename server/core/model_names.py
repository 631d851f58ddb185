"""Names of models as Ollama's clients write them: `name:tag`. The tag `latest` is optional.

These clients also send the names to the endpoints of other families.
"""

from __future__ import annotations

from collections.abc import Collection

_LATEST = ":latest"


def served_name(name: str, names: Collection[str]) -> str:
    """Return the one of `names` that a client means by `name`, or a name that no model has."""
    for each in (name, name + _LATEST):
        if each in names:
            return each
    return name.removesuffix(_LATEST)


def with_tag(name: str) -> str:
    """Return a name as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST
