"""The text in a compaction item, in the form in which clients send it back.

OpenAI's clients treat `encrypted_content` as opaque. Here it is a mark and the summary in base64.
It is not encrypted, because a client may send any text to the model anyway.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "piecework-summary-1."


def pack_summary(text: str) -> str:
    """Return the `encrypted_content` of a summary."""
    return _MARK + base64.b64encode(text.encode()).decode()


def read_summary(content: str) -> str | None:
    """Return the summary in an `encrypted_content`, or None if another server made it."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
