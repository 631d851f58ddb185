"""The format for models whose chat templates do not describe tools.

The tools are described in text (`in_text.py`), and the grammar enforces Hermes' format.
"""

from __future__ import annotations

from .hermes import HERMES
from .json_calls import JsonFormat


class Generic(JsonFormat):
    """Hermes' format for templates without tools."""

    in_template = False


FORMATS = (
    Generic(
        **{**vars(HERMES), "name": "generic", "aliases": (), "found_by": lambda template: False}
    ),
)
