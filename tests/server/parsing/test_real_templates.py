"""Chat templates of real models: `PIECEWORK_CHAT_TEMPLATES` names a folder with .jinja files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_templates import templates

from piecework.server.parsing.detection import detect, detect_reasoning

FOLDER = os.environ.get("PIECEWORK_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).rglob("*.jinja")) if FOLDER else []
UNREAD = {
    "MiniMax-M3": "nested values are elements of XML",
    "meetkai-functionary-medium-v3.2": "every answer begins with its recipient",
    "muse-glimmer": "every answer begins with its recipient",
    "muse_glimmer": "every answer begins with its recipient",
}
"""Templates that write calls in a format that no file of `server/parsing/` has, and why."""


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="PIECEWORK_CHAT_TEMPLATES names no folder of templates")
def test_each_template_that_writes_a_call_has_a_format_that_reads_it() -> None:
    missed = []
    print()
    for path in FILES:
        template = templates(path.read_text(encoding="utf-8"))
        found, thoughts = detect(template), detect_reasoning(template)
        name = thoughts.name if thoughts else "none"
        print(f"{path.stem:60} {found.form.name:18} {name:16} {found.reason}")
        writes = "writes tool calls in a format unknown" in found.reason
        if writes and path.stem.removesuffix("_training") not in UNREAD:
            missed.append(path.name)
    assert not missed
