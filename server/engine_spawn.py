"""Starts engine processes: they import what they need, which takes seconds, and then wait for a job on their standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_PROCESS = (sys.executable, "-m", "piecework.runtime.process")
LANGUAGE_MODEL = (*_PROCESS, "piecework.runtime.engine_process")
DIFFUSION_PIPELINE = (*_PROCESS, "piecework.runtime.diffusion.engine_process")
_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000"}
"""libgomp's threads spin for milliseconds before they sleep, by default: whatever else needs a core waits for them, and they for it.
Read when torch is loaded; what the user has set comes first."""


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that ends when its standard input does."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**_ENVIRONMENT, **os.environ})


@contextmanager
def spawned(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The same, ended with the block at the latest."""
    process = spawn(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
