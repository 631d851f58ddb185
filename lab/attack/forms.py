"""Bodies of forms with a file: `multipart/form-data` with one boundary."""

from __future__ import annotations

import io
import json
import math
import struct
import wave
from collections.abc import Mapping
from functools import cache
from typing import Any

_BOUNDARY = b"boundary-of-a-form"
FORM = f"multipart/form-data; boundary={_BOUNDARY.decode()}"
FORM_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"})


def form(body: Any) -> bytes:
    """Return an object as a form.

    A list is a field that is sent several times. The member `file` names a file of `_files`; other
    values of that member are the content of a file.
    """
    written = []
    for name, value in (body if isinstance(body, dict) else {"body": body}).items():
        for each in value[:50] if isinstance(value, list) else [value]:
            text = each if isinstance(each, str) else json.dumps(each)
            content, head = text.encode(errors="replace"), json.dumps(name)
            if name == "file":
                content, head = _files().get(text, content), f'{head}; filename="a"'
            written += [b"--" + _BOUNDARY, b"Content-Disposition: form-data; name=" + head.encode()]
            written += [b"", content]
    return b"\r\n".join([*written, b"--" + _BOUNDARY + b"--", b""])


@cache
def _files() -> Mapping[str, bytes]:
    """Return the contents of files by name."""
    body = {"prompt": "The fox", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    tone = _tone(0.3)
    return {
        "tone.wav": tone,
        "cut.wav": tone[:1000],
        "long.wav": tone[:40] + b"\xff\xff\xff\x7f" + tone[44:],  # It says that it has 2 GB.
        "batch.jsonl": json.dumps(line).encode() + b"\n",
    }


def _tone(seconds: float) -> bytes:
    """Return a WAV file with a tone."""
    samples = [int(8000 * math.sin(number / 6)) for number in range(int(16000 * seconds))]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()
