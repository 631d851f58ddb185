"""Graphs: work recorded once and run again without Python, and the tensors that look into their
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

Work = Callable[[], Sequence[torch.Tensor]]
"""What is recorded. It must read and write the same addresses each time; its outputs are new
tensors.
"""

HostArguments = Callable[[], Mapping[str, Any]]
"""What kernels of a graph read on the host rather than in tensors, as it must be at the next
replay: values by the kernels' names.
"""


class Graph(Protocol):
    """One recorded stretch of work. `pool` and `stream` come from the platform that the graph comes
    from.
    """

    def capture(self, work: Work, pool: Any, stream: Any) -> list[torch.Tensor]:
        """Record `work`; returns its outputs, in the pool's memory. Their contents are undefined
        until `replay`.

        Memory of outputs that nobody holds any more is given to later captures of the same pool:
        replays must follow the order of the captures, and who needs an output without holding it
        uses a weak reference.
        """
        ...

    def begin(self, pool: Any, stream: Any) -> None:
        """Record all that is launched from now on. Raises `RuntimeError` where a platform cannot
        (`Platform.graphs_are_real`).
        """
        ...

    def end(self) -> None:
        """Stop recording."""
        ...

    def replay(self) -> None:
        """Run what was recorded, on the current stream."""
        ...


_lost: list[Any] = []
"""Graphs whose captures could not begin or end. The allocator goes on asking them what belongs to
their pools, so they must not die.
"""


class DeviceGraph:
    """A graph of a device whose API is that of `torch.cuda`: `graph` records what is launched on a
    side stream.

    `stream_context`: `torch.cuda.stream` or its like. `error_mode`: which calls are forbidden
    during a capture, as `torch.cuda.CUDAGraph.capture_begin` defines it.
    """

    def __init__(self, graph: Any, stream_context: Callable[[Any], Any], error_mode: str) -> None:
        self._graph, self._stream_context, self._error_mode = graph, stream_context, error_mode
        self._recording = contextlib.ExitStack()

    def capture(self, work: Work, pool: Any, stream: Any) -> list[torch.Tensor]:
        self.begin(pool, stream)
        try:
            outputs = list(work())
        except BaseException:
            # The capture must end, or the stream stays lost; what it reports after a failure is
            # less than the failure.
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
    """A tensor on the same memory that does not keep it: for memory that a graph's pool owns.

    Same size, strides and dtype. Reading it after the pool has gone is undefined.
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
    """Launch on `stream` inside the block: after what was launched on `current` before, before what
    is launched there next.
    """
    stream.wait_stream(current)
    with stream_context(stream):
        yield
    current.wait_stream(stream)
