"""Graphs on the CPU: the work is called again and its outputs are copied to where the first ones
lay.

Memory behaves as in a CUDA graph's pool: outputs that nobody holds are given to later captures, so
whoever keeps a stale tensor reads another one's numbers here too.
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
        """An uninitialised tensor of the same size, strides and dtype; its memory comes back when
        the tensor is dropped.
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
        # Whole cache lines, and a multiple of every dtype's size.
        buffer = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)
        self._buffers.append(buffer)
        return buffer

    def _give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class CpuGraph:
    """Work to call again. `work` is kept, so it must hold its inputs as weakly as a device's graph
    does.

    Like a device's, the memory of its pool stays as long as it does, whoever else lets go of the
    pool.
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
        raise RuntimeError(
            "a CPU cannot record what runs between two points; it can only call work again"
        )

    def end(self) -> None:
        raise RuntimeError("nothing is being recorded")

    def replay(self) -> None:
        assert self._work is not None, "replay before capture"
        for output, fresh in zip(self._outputs, self._work(), strict=True):
            output.copy_(fresh)
