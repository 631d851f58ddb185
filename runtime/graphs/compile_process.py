"""Starts the process that compiles a model's pieces into the cache while the engine serves."""

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
from ..config.model import ModelConfig
from ..config.resolved import ResolvedConfig
from ..quantization.methods import Kinds

COMMAND = (
    *(sys.executable, "-m", "piecework.runtime.process.parent", "--no-job"),
    "piecework.runtime.graphs.compile_pieces",
)
_MOST_BYTES = 2**16
own_niceness: int | None = None  # Replaces the niceness that the process would choose.


class Outcome(NamedTuple):
    """How a compiling process ended.

    `reason` is None if the cache holds all pieces that can be compiled. Otherwise `text` explains
    it in a line.
    """

    reason: Reason | None
    text: str = ""


class CompileProcess:
    """A running process of `compile_pieces`. It ends with this process at the latest."""

    def __init__(self, job: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ended: Outcome | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Outcome | None:
        """Return the outcome, or None while the process runs."""
        if self._ended is None and (code := self._process.poll()) is not None:
            self._ended = self._outcome(code)
        return self._ended

    def wait(self) -> Outcome:
        self._process.wait()
        ended = self.poll()
        assert ended is not None
        return ended

    def stop(self) -> None:
        # Not SIGTERM: the process inherits from the engine that it is ignored.
        self._process.kill()
        self._process.wait()

    def _outcome(self, code: int) -> Outcome:
        if code == 0:
            return Outcome(None)
        assert self._process.stdout is not None
        # Do not read to the end of the pipe: a compiler that outlives the process may hold it open.
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            output = os.read(self._process.stdout.fileno(), _MOST_BYTES)
            reason, text = json.loads(output.splitlines()[-1])
            return Outcome(Reason(reason), str(text))
        except (BlockingIOError, ValueError, TypeError, IndexError):
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            return Outcome(Reason.COMPILE_FAILED, f"the compiling process {how}")


def start(
    config: ResolvedConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kinds: Kinds,
    adapter_rank: int | None = None,
) -> CompileProcess:
    """Start a compiling process. It runs at low priority and needs no weights.

    `kinds` are the packed layers. `adapter_rank` is the rank of the slots of adapters, if they are
    on. The job holds all that depends on the state of the machine,
    because the process itself might find another state.
    """
    config = replace(
        config, num_threads=torch.get_num_threads(), max_lora_rank=adapter_rank, lora_modules=""
    )
    parts: dict[str, Any] = {
        "config": asdict(config),
        "model": asdict(model_config),
        "dtype": str(dtype).removeprefix("torch."),
        "kinds": dict(kinds),
    }
    parts |= {"inductor": inductor_changes(), "niceness": own_niceness}
    return CompileProcess(json.dumps(parts))
