"""Graphs: work that is captured once and replayed without Python, and tensors that refer to their
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

# The work to capture. It must read and write the same addresses each time. Its outputs are new
# tensors.
Work = Callable[[], Sequence[torch.Tensor]]

# Returns the values that kernels of a graph read on the host at the next replay, by the kernels'
# names.
HostArguments = Callable[[], Mapping[str, Any]]


class Graph(Protocol):
    """One captured piece of work. `pool` and `stream` come from the same platform as the graph."""

    def capture(self, work: Work, pool: Any, stream: Any) -> list[torch.Tensor]:
        """Capture `work` and return its outputs, in the pool's memory. Their contents are undefined
        until `replay`.

        When no reference to an output is left, its memory goes to later captures of the same pool.
        Replays must therefore follow the order of the captures. To use an output without holding
        its memory, keep a weak reference (`weak_ref_tensor`).
        """
        ...

    def begin(self, pool: Any, stream: Any) -> None:
        """Capture all that is launched from now on. Raise `RuntimeError` if the platform cannot
        (`Platform.graphs_are_real`).
        """
        ...

    def end(self) -> None:
        """End the capture."""
        ...

    def replay(self) -> None:
        """Replay the captured work on the current stream."""
        ...


# Graphs whose capture failed to begin or end. They must stay alive, because the allocator keeps
# asking them which memory belongs to their pools.
_lost: list[Any] = []


class DeviceGraph:
    """A graph of a device with the API of `torch.cuda`: `graph` captures what is launched on a side
    stream.

    `stream_context` is `torch.cuda.stream` or its equivalent. `error_mode` names the calls that are
    forbidden during a capture, as in `torch.cuda.CUDAGraph.capture_begin`.
    """

    def __init__(self, graph: Any, stream_context: Callable[[Any], Any], error_mode: str) -> None:
        self._graph, self._stream_context, self._error_mode = graph, stream_context, error_mode
        self._recording = contextlib.ExitStack()

    def capture(self, work: Work, pool: Any, stream: Any) -> list[torch.Tensor]:
        self.begin(pool, stream)
        try:
            outputs = list(work())
        except BaseException:
            # End the capture, or the stream stays unusable. The first error matters more than a
            # second one.
            with contextlib.suppress(RuntimeError):
                self.end()
            raise
        self.end()
        return outputs

    def begin(self, pool: Any, stream: Any) -> None:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._stream_context(stream))
            with self._kept_if_lost():
                self._graph.capture_begin(pool=pool, capture_error_mode=self._error_mode)
            self._recording = entered.pop_all()

    def end(self) -> None:
        with self._recording, self._kept_if_lost():
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    @contextlib.contextmanager
    def _kept_if_lost(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            _lost.append(self._graph)
            raise


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory, size, strides and dtype that does not keep the memory
    alive.

    It is for memory that a graph's pool owns. Reading it after the pool is freed is undefined.
    """
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, span * tensor.element_size()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, tensor.size(), tensor.stride()
    )


@contextlib.contextmanager
def side_stream(stream: Any, current: Any, stream_context: Callable[[Any], Any]) -> Iterator[None]:
    """Launch on `stream` inside the block: after earlier work on `current`, and before later work
    there.
    """
    stream.wait_stream(current)
    with stream_context(stream):
        yield
    current.wait_stream(stream)
