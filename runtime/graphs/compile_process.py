"""The process that compiles a model's pieces into the cache, seen from the engine, which goes on
serving meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from ...compilation.capture import Reason
from ...compilation.torch_private import inductor_changes
from ..config.engine import ResolvedConfig
from ..config.model import ModelConfig
from ..quantization.methods import Kinds

COMMAND = (
    *(sys.executable, "-m", "piecework.runtime.process.parent", "--no-job"),
    "piecework.runtime.graphs.compile_pieces",
)
_MOST_BYTES = 2**16
own_niceness: int | None = None
"""Other than what such a process chooses."""


class Outcome(NamedTuple):
    """How a compiling process ended. `reason`: None where all is in the cache that can be; else why
    not, which `text` says in a line.
    """

    reason: Reason | None
    text: str = ""


class CompileProcess:
    """A process of `compile_pieces` that runs, at most as long as this one."""

    def __init__(self, job: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ended: Outcome | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Outcome | None:
        """None while it runs."""
        if self._ended is None and (code := self._process.poll()) is not None:
            self._ended = self._outcome(code)
        return self._ended

    def wait(self) -> Outcome:
        self._process.wait()
        ended = self.poll()
        assert ended is not None
        return ended

    def stop(self) -> None:
        # Not SIGTERM, which it has inherited from the engine to ignore.
        self._process.kill()
        self._process.wait()

    def _outcome(self, code: int) -> Outcome:
        if code == 0:
            return Outcome(None)
        try:
            reason, text = json.loads(self._last_words().splitlines()[-1])
            return Outcome(Reason(reason), str(text))
        except (ValueError, TypeError, IndexError):
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            return Outcome(Reason.COMPILE_FAILED, f"the compiling process {how}")

    def _last_words(self) -> bytes:
        """What it has printed. Not to the end of the pipe: a compiler that outlives it may hold the
        other end.
        """
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            return os.read(self._process.stdout.fileno(), _MOST_BYTES)
        except BlockingIOError:
            return b""


def start(
    config: ResolvedConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kinds: Kinds,
) -> CompileProcess:
    """Begin to compile; the process works at a low priority and needs no weights.

    `kinds`: the packed layers. All that depends on the state of the machine is told: what the
    process found out by itself might be something else.
    """
    config = replace(config, num_threads=torch.get_num_threads())
    parts: dict[str, Any] = {
        "config": asdict(config),
        "model": asdict(model_config),
        "dtype": str(dtype).removeprefix("torch."),
        "kinds": dict(kinds),
    }
    parts |= {"inductor": inductor_changes(), "niceness": own_niceness}
    return CompileProcess(json.dumps(parts))
