"""For models whose chat templates know no tools: they are told of them in text (`in_text.py`), and
what they answer is held to Hermes' format by the grammar.
"""

from __future__ import annotations

from .hermes import HERMES
from .json_calls import JsonFormat


class Generic(JsonFormat):
    """A `ToolCallFormat`."""

    in_template = False


FORMATS = (
    Generic(
        **{**vars(HERMES), "name": "generic", "aliases": (), "found_by": lambda template: False}
    ),
)
