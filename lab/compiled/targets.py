"""The GPUs that kernels are compiled for, and a driver that stands in for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from piecework.kernels.triton import device

# Bytes of shared memory that one block may have, by compute capability: CUDA C++ Programming Guide,
# technical specifications.
SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
_PROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}


class StandIn:
    """Answers what Triton asks a driver for while it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(slots=True)
class Recorded:
    """A kernel that a case launches, or the error that its compiler raised."""

    case: str
    name: str
    kernel: Any = None
    error: str | None = None


@dataclass(slots=True)
class Recorder:
    """Compiles launches instead of running them.

    Attributes:
        case: Name of the calls that are recorded now.
        found: Every kernel of the case once, in the order of the first launches.
    """

    capability: int
    case: str = ""
    found: list[Recorded] = field(default_factory=list)
    _hashes: set[str] = field(default_factory=set)

    def begin(self, case: str) -> None:
        self.case, self.found, self._hashes = case, [], set()

    def add(self, name: str, kernel: Any) -> None:
        if kernel.hash not in self._hashes:
            self._hashes.add(kernel.hash)
            self.found.append(Recorded(self.case, name, kernel))


@contextmanager
def recording(capability: int) -> Iterator[Recorder]:
    """Within this context, each launch of a Triton kernel compiles exactly the specialisation that
    it would run on a GPU of `capability` (90 for 9.0), and runs nothing. The process's driver of
    Triton stays replaced.
    """
    recorder = Recorder(capability)
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        try:
            recorder.add(name, run(self, *args, grid=grid, warmup=True, **options))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:1000]}"
            recorder.found.append(Recorded(recorder.case, name, error=text))

    properties = device.Properties(
        divmod(capability, 10), _PROCESSORS[capability], SHARED_MEMORY[capability]
    )
    driver.set_active(StandIn(capability))
    with (
        patch.object(jit.JITFunction, "run", compile_only),
        patch.object(device, "properties", lambda _: properties),
    ):
        yield recorder
