"""Nemotron Nano v2 writes a JSON array between `<TOOLCALL>` and `</TOOLCALL>`.

Format: the chat template of nvidia/NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .granite import GRANITE
from .json_calls import OBJECT_END

CALLS, CALLS_END = "<TOOLCALL>", "</TOOLCALL>"

FORMATS = (
    replace(
        GRANITE,
        name="nemotron_nano_v2",
        aliases=("nemotron_json",),
        section=Section(CALLS, "[", ", ", f"]{CALLS_END}"),
        end=rf"{OBJECT_END}\s{{0,20}}\]\s{{0,20}}{CALLS_END}",
        found_by=lambda template: CALLS in template,
        marks=(CALLS, CALLS_END),
    ),
)
