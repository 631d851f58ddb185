"""Graphs on the CPU: a replay calls the work again and copies its outputs to the addresses of the
first ones.

Memory behaves as in a CUDA graph's pool: the memory of outputs without references goes to later
captures, so a stale tensor shows another output's numbers here too.
"""

from __future__ import annotations

import weakref

import torch

from ..graph import Work, weak_ref_tensor


class CpuGraphPool:
    """Memory of all graphs that are captured into it. It only grows; `num_bytes` is its size."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor of the same size, strides and dtype. Its memory is reused
        when the tensor is dropped.
        """
        span = (
            1
            + sum(
                (size - 1) * stride
                for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
            )
            if tensor.numel()
            else 0
        )
        buffer = self._take(span * tensor.element_size())
        owner = buffer.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        weakref.finalize(owner, self._give_back, buffer).atexit = False
        return owner

    def _take(self, nbytes: int) -> torch.Tensor:
        fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes]
        if fitting:
            buffer = min(fitting, key=lambda found: found.nbytes)
            self._free = [free for free in self._free if free is not buffer]
            return buffer
        # Whole cache lines, which are a multiple of every dtype's size.
        buffer = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)
        self._buffers.append(buffer)
        return buffer

    def _give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class CpuGraph:
    """Work that is called again. `work` is kept, so it must hold its inputs as weakly as a device's
    graph does.

    A graph keeps the memory of its pool, as a device's graph does.
    """

    def __init__(self) -> None:
        self._work: Work | None = None
        self._outputs: list[torch.Tensor] = []
        self._pool: CpuGraphPool | None = None

    def capture(self, work: Work, pool: CpuGraphPool, stream: None) -> list[torch.Tensor]:
        outputs = []
        for fresh in work():
            output = pool.like(fresh)
            output.copy_(fresh)
            outputs.append(output)
        self._work, self._outputs, self._pool = (
            work,
            [weak_ref_tensor(output) for output in outputs],
            pool,
        )
        return outputs

    def begin(self, pool: CpuGraphPool, stream: None) -> None:
        raise RuntimeError("a CPU cannot capture launches; it can only call work again")

    def end(self) -> None:
        raise RuntimeError("no capture is going on")

    def replay(self) -> None:
        assert self._work is not None, "replay before capture"
        for output, fresh in zip(self._outputs, self._work(), strict=True):
            output.copy_(fresh)
